"""Makes an experiment, by gem-train, by a launcher like it, or in this process."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks import load_task

from benchmarks.lib.launch import RunFailed, gem_train, launch
from benchmarks.paper import sequential, simulated
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.results import Columns, Result, read_run

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through a proxy of the environment
_ADDRESS = re.compile(r"metrics (http://\S+?),")
_VERSION = re.compile(r"^gem_central_version (\S+)", re.MULTILINE)
_MEDIAN = re.compile(r'^gem_pi_tensor_median{tensor="(.+)"} (\S+)', re.MULTILINE)


EVALUATIONS = 80  # of a run with simulated compute time, so that the cores are left to its workers
PROCESSES = max(2, os.cpu_count() or 2)  # worker processes that a run's workers share


def make(experiment: Experiment, data: Path | None) -> Result:
    """Makes the run. Raises RunFailed and TaskError.

    Args:
        data: Folder of the task's data; None for a task that needs none.
    """
    if experiment.setting == "sequential":
        return sequential.run(experiment, data)
    if experiment.setting == "simulated":
        return simulated.run(experiment, load_task(experiment.task, data))
    with tempfile.TemporaryDirectory(prefix="gem-paper-") as name:
        poller = MetricsPoller(Path(name) / "output.txt")
        folder = (staged if experiment.setting == "staged" else served)(experiment, data, Path(name), poller.poll)
        try:
            return read_run(experiment, folder, poller.tensors)
        except (OSError, ValueError, KeyError) as error:
            raise RunFailed(f"the run's folder can't be read: {error!r}") from error


def staged(experiment: Experiment, data: Path | None, folder: Path, watch: Callable[[], None]) -> RunFolder:
    """Makes an experiment's run by the launcher for other clusters. Raises RunFailed."""
    given = {"experiment": vars(experiment), "data": data and str(data.resolve()), "runs": str(folder)}
    command = [sys.executable, "-m", "benchmarks.paper.staged", json.dumps(given)]
    return launch(command, folder / "output.txt", watch)


def served(experiment: Experiment, data: Path | None, folder: Path, watch: Callable[[], None] = lambda: None) -> RunFolder:
    """Makes an experiment's run by gem-train. Raises RunFailed."""
    settings = replace(experiment.hyperparameters(), steps=experiment.commits_each, epochs=0, shards="replicate")
    more: dict[str, Any] = {"turns": experiment.turns, "step_seconds": experiment.step_seconds}
    if experiment.step_seconds:
        more["evaluate_every"] = max(2.0, experiment.steps * experiment.step_seconds / EVALUATIONS)
    return gem_train(settings, experiment.task, data, experiment.workers, folder, watch, PROCESSES, **more)


class MetricsPoller:
    """Polls the metrics of one run; the address is found in what gem-train printed."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._address = ""
        self._rows: list[tuple[int, dict[str, float]]] = []

    def poll(self) -> None:
        """Polls once. Ignores a server that does not respond because it is starting or has ended."""
        if not self._address:
            found = _ADDRESS.search(self._output.read_text(errors="replace"))
            self._address = found[1] if found else ""
        if not self._address:
            return
        try:
            with _DIRECT.open(self._address, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return
        version, tensors = read_metrics(text)
        if tensors and not (self._rows and self._rows[-1][0] == version):
            self._rows.append((version, tensors))

    @property
    def tensors(self) -> Columns:
        """Columns: version, and the median π of each tensor by its name. Empty where the rule has no π."""
        if not self._rows:
            return {}
        names = list(self._rows[-1][1])
        columns = {name: np.array([row.get(name, np.nan) for _, row in self._rows]) for name in names}
        return {"version": np.array([version for version, _ in self._rows], float), **columns}


def read_metrics(text: str) -> tuple[int, dict[str, float]]:
    """The version and the tensors' medians in Prometheus' text format."""
    version = _VERSION.search(text)
    return int(float(version[1])) if version else 0, {tensor: float(median) for tensor, median in _MEDIAN.findall(text)}
