"""Made-up results of experiments, for tests of what is computed from results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gem_worker.tasks.convnet import ConvNet

from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import FIGURES, Scale
from benchmarks.paper.results import Result
from benchmarks.paper.statistics import Measured, gather

POINTS = 60


def made_up(
    experiment: Experiment, *, final: float = 0.1, accuracy: float | None = 0.99, pi: float = 0.5, outcome: str = "complete",
    **changes: Any,
) -> Result:  # fmt: skip
    """A result whose loss falls exponentially to `final`, at the times that the simulated compute time would give."""
    progress = np.linspace(1 / POINTS, 1, POINTS)
    version = np.round(progress * experiment.gradients / experiment.local_steps)
    curves = {
        "version": version,
        "samples": progress * experiment.gradients * experiment.batch_size,
        "seconds": progress * max(1.0, experiment.steps * experiment.step_seconds),
        "loss": final + (2.3 - final) * np.exp(-8 * progress),
        "staleness": np.full(POINTS, experiment.workers - 1.0),
        "pi_median": np.full(POINTS, pi),
    }
    evaluations = {"version": version, "loss": curves["loss"], "accuracy": np.full(POINTS, accuracy or np.nan)}
    tensors = {"version": version} | {
        name: pi * (1 + place) * (1.5 - progress) for place, name in enumerate(dict(ConvNet().named_parameters()))
    }
    values = {
        "experiment": experiment, "outcome": outcome, "test_accuracy": accuracy, "test_loss": final, "seconds": 9.0,
        "curves": curves, "evaluations": evaluations, "tensors": tensors, "settings": {}, "versions": {"gem-ps": "1"},
    }  # fmt: skip
    return Result(**{**values, **changes})


def measured(figure: str, scale: Scale, make: Callable[[Experiment], Result | None] = made_up) -> list[Measured]:
    """All lines of a figure, each result made up."""
    return gather(FIGURES[figure](scale), make)
