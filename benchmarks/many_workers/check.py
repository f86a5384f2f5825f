"""The simulation beside the real service: gem-train makes a run, and the simulation repeats it in the order that it had."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_worker.tasks import Task

from benchmarks.lib.results import Store
from benchmarks.many_workers.order import recorded
from benchmarks.many_workers.simulation import train
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.runner import served

STEPS = 60
PARTS = 6  # of a run, whose mean losses are compared


@dataclass(frozen=True)
class Service:
    """A run of the service. Each of its workers made STEPS commits."""

    workers: int


SERVICES = (Service(30), Service(100))


@dataclass(frozen=True)
class Comparison:
    """What the service and the simulation reached in the same order.

    Attributes:
        losses: Mean training loss of each of PARTS parts of the run: of the service, of the simulation.
        accuracies: Share of correct answers on the test data at the end: of the service, of the simulation.
    """

    losses: tuple[list[float], list[float]]
    accuracies: tuple[float, float]


def compare(service: Service, task: Task, data: Path) -> Comparison:
    """Makes both runs. Raises RunFailed."""
    workers = service.workers
    with tempfile.TemporaryDirectory(prefix="gem-many-") as name:
        folder = served(Experiment("mnist", workers=workers, steps=STEPS, turns="random"), data, Path(name))
        real = folder.history()["loss"].reshape(PARTS, -1).mean(axis=1)
        accuracy = json.loads(folder.summary.read_text())["test_accuracy"]
        rows = train(task, Hyperparameters(), recorded(folder.commits), workers, workers * STEPS // PARTS)
    simulated = np.array([row["loss"] for row in rows])
    losses = [[round(float(loss), 4) for loss in each] for each in (real, simulated)]
    return Comparison((losses[0], losses[1]), (round(accuracy, 4), round(rows[-1]["accuracy"], 4)))


def stored(folder: Path) -> Store[Service, Comparison]:
    return Store(folder / "check.json", "service", Service, vars, lambda service, row: Comparison(**row))


def checks_text(comparisons: Mapping[Service, Comparison]) -> str:
    """A clause about each, for the page."""
    found = []
    for service, each in comparisons.items():
        real, simulated = (f"{100 * accuracy:.2f} %" for accuracy in each.accuracies)
        apart = max(abs(one - other) for one, other in zip(*each.losses, strict=True))
        found.append(f"{real} with {service.workers} workers, simulated {simulated} (losses differ by at most {apart:.2f})")
    return "; ".join(found)
