"""The stored result of an experiment: a small JSON file with its settings, curves of at most 400 points, and final figures."""

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

from benchmarks.lib.results import plain, write_json
from benchmarks.paper.experiments import Experiment

Array: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = dict[str, Array]
FORMAT = 1
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

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        body = {"format": FORMAT, **vars(self), "experiment": vars(self.experiment), "seconds": round(self.seconds, 1)}
        body |= {name: _to_lists(getattr(self, name)) for name in _CURVES}
        write_json(path, body, indent=None)


def load(path: Path, experiment: Experiment) -> Result | None:
    """The experiment's result; None if there is none, or it is damaged, incomplete or has other settings."""
    try:
        body = json.loads(path.read_text())
        if body.pop("format") != FORMAT or Experiment(**body.pop("experiment")) != experiment:
            return None
        curves: dict[str, Any] = {name: _from_lists(body.pop(name)) for name in _CURVES}
        if not {"version", "samples", "seconds", "loss"} <= curves["curves"].keys():
            return None
        return Result(experiment, **curves, **body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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


def _to_lists(columns: Columns) -> dict[str, list[float | None]]:
    """For JSON: rounded to six digits; null for NaN and infinity."""
    return {name: [plain(value) for value in values.tolist()] for name, values in columns.items()}


def _from_lists(columns: dict[str, list[float | None]]) -> Columns:
    curves = {name: np.array([math.nan if value is None else value for value in values]) for name, values in columns.items()}
    if len({len(values) for values in curves.values()}) > 1:
        raise ValueError("columns of different lengths")
    return curves
