"""The stored results of experiments: curves of at most 400 points, and final figures."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gem_api.curves import Curves
from gem_worker.launcher.run_folder import RunFolder, samples_applied

from benchmarks.lib.results import Row, Store, plain
from benchmarks.paper.experiments import Experiment

Array: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = dict[str, Array]
_CURVES = ("curves", "evaluations", "tensors")


@dataclass(frozen=True)
class Result:
    """The result of an experiment.

    Attributes:
        outcome: "complete" or "diverged".
        test_accuracy: 0 to 1, of the last θ; None where it could not be evaluated.
        test_loss: Test loss of the last θ; None if it is NaN or infinite.
        seconds: How long the run took, its start and end included.
        curves: version; samples (trained on so far); seconds (since the first commit); loss, staleness, pi_median.
        evaluations: version, loss, accuracy on held-out data.
        tensors: version, and the median π of each tensor by its name; empty where the rule has none.
        settings: All of the run's hyper-parameters.
        versions: Of the packages.
    """

    experiment: Experiment
    outcome: str
    test_accuracy: float | None
    test_loss: float | None
    seconds: float
    curves: Columns
    evaluations: Columns
    tensors: Columns
    settings: dict[str, Any]
    versions: dict[str, str]

    @property
    def steps(self) -> Array:
        """The worker step of each point: gradients so far, by the number of workers."""
        return self.curves["version"] * self.experiment.local_steps / self.experiment.workers

    def __str__(self) -> str:
        accuracy = "–" if self.test_accuracy is None else f"{100 * self.test_accuracy:.2f} %"
        return f"{self.outcome}, test accuracy {accuracy}"


def stored(folder: Path) -> Store[Experiment, Result]:
    return Store(folder / "runs/results.json", "experiment", Experiment, _row, _result)


def _row(result: Result) -> Row:
    lists = {name: {each: [*map(plain, values.tolist())] for each, values in getattr(result, name).items()} for name in _CURVES}
    return {name: value for name, value in vars(result).items() if name != "experiment"} | lists


def _result(experiment: Experiment, row: Row) -> Result:
    for name in _CURVES:
        row[name] = {each: np.array(values, float) for each, values in row[name].items()}  # null is NaN
    return Result(experiment, **row)


def read_run(experiment: Experiment, folder: RunFolder, tensors: Columns) -> Result:
    """The result of a finished run of gem-train, from the folder that it left. Raises OSError and ValueError."""
    summary = json.loads(folder.summary.read_text())
    history = folder.history()
    began = history["unix_seconds"][0] if len(history["unix_seconds"]) else 0.0
    curves = {
        "version": history["version"],
        "samples": np.cumsum(samples_applied(history)),
        "seconds": history["unix_seconds"] - began,
        **{name: history[name] for name in ("loss", "staleness", "pi_median")},
    }
    scores = folder.load_evaluations()
    evaluations = {
        "version": np.array([score.version for score in scores], float),
        "loss": np.array([score.loss for score in scores], float),
        "accuracy": np.array([math.nan if score.accuracy is None else score.accuracy for score in scores], float),
    }
    return Result(
        experiment, summary["outcome"], summary["test_accuracy"], summary["test_loss"], summary["seconds"], thin(curves),
        thin(evaluations), thin(tensors), summary["hyperparameters"], summary["versions"],
    )  # fmt: skip


def thin(columns: Columns) -> Columns:
    """The means of a curve over bins of equal width, at most 400, by version."""
    if not columns:
        return {}
    curves = Curves(list(columns), ())
    curves.add(columns["version"], columns)
    return {name: curves.mean(name) for name in columns}
