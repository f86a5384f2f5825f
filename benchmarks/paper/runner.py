"""Makes an experiment, by gem-train, by a launcher like it, or in this process, and saves its result."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gem_worker.tasks import load_task

from benchmarks.lib.launch import RunFailed, launch
from benchmarks.paper import sequential, simulated
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.results import Columns, Result, load, read_run

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through a proxy of the environment
_ADDRESS = re.compile(r"metrics (http://\S+?),")
_VERSION = re.compile(r"^gem_central_version (\S+)", re.MULTILINE)
_MEDIAN = re.compile(r'^gem_pi_tensor_median{tensor="(.+)"} (\S+)', re.MULTILINE)


@dataclass(frozen=True)
class Runner:
    """Makes experiments.

    Args:
        folder: Keeps a file for each result.
        data: Folder of the task's data; None for a task that needs none.
        processes: Worker processes that a run's workers share.
    """

    folder: Path
    data: Path | None
    processes: int

    def path(self, experiment: Experiment) -> Path:
        return self.folder / f"{experiment.key}.json"

    def result(self, experiment: Experiment) -> Result | None:
        """The experiment's stored result, if there is one."""
        return load(self.path(experiment), experiment)

    def make(self, experiment: Experiment) -> str:
        """Makes the run, saves its result, and returns what came out. Raises RunFailed and TaskError."""
        if experiment.setting == "sequential":
            result = sequential.run(experiment, self.data)
        elif experiment.setting == "simulated":
            result = simulated.run(experiment, load_task(experiment.task, self.data))
        else:
            with tempfile.TemporaryDirectory(prefix="gem-paper-") as folder:
                result = self._launch(experiment, Path(folder))
        result.save(self.path(experiment))
        accuracy = "–" if result.test_accuracy is None else f"{100 * result.test_accuracy:.2f} %"
        return f"{result.outcome}, test accuracy {accuracy}"

    def _launch(self, experiment: Experiment, folder: Path) -> Result:
        """Makes the run in processes, and reads the folder that it left. Raises RunFailed."""
        output = folder / "output.txt"
        poller = MetricsPoller(output)
        run_folder = launch(
            command(experiment, self.data, folder / "runs", self.processes), output, poller.poll, variables(experiment)
        )
        try:
            return read_run(experiment, run_folder, poller.tensors)
        except (OSError, ValueError, KeyError) as error:
            raise RunFailed(f"the run's folder can't be read: {error!r}") from error


def command(experiment: Experiment, data: Path | None, runs: Path, processes: int) -> list[str]:
    """The command line of an experiment's own process, which leaves its run folder in `runs`."""
    if experiment.setting == "staged":
        given = {"experiment": vars(experiment), "data": data and str(data.resolve()), "runs": str(runs)}
        return [sys.executable, "-m", "benchmarks.paper.staged", json.dumps(given)]
    flags = [
        f"--task={experiment.task}", f"--rule={_rule(experiment)}", f"--workers={experiment.workers}", f"--runs={runs}",
        f"--learning-rate={experiment.learning_rate}", f"--batch-size={experiment.batch_size}", f"--seed={experiment.seed}",
        "--shards=replicate",
    ]  # fmt: skip
    flags += [f"--data={data.resolve()}"] if data else []
    flags += [f"--local-steps={experiment.local_steps}"] if experiment.local_steps > 1 else []
    flags += [f"--steps={experiment.commits_each}", "--durability=memory"]
    flags += [f"--processes={processes}"] if processes < experiment.workers else []
    return [sys.executable, "-m", "gem_worker.launcher.cli", *flags]


def variables(experiment: Experiment) -> dict[str, str]:
    """The settings of gem-train that are no options, as environment variables."""
    return {"GEM_TURNS": experiment.turns, "GEM_STEP_SECONDS": str(experiment.step_seconds)}


def _rule(experiment: Experiment) -> str:
    """The rule with its settings, as --rule takes them."""
    settings = experiment.rule_options.split()
    if experiment.rule == "gem":
        settings += [f"{name}={getattr(experiment, name)}" for name in ("momentum", "kappa", "snapshot", "pi_max")]
    return f"{experiment.rule}:{','.join(settings)}" if settings else experiment.rule


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
