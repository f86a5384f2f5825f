"""The simulation beside the real service: gem-train makes a run, and the simulation repeats it in the order that it had."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_worker.tasks import Task

from benchmarks.lib.launch import launch
from benchmarks.lib.page import table
from benchmarks.lib.results import write_rows
from benchmarks.many_workers.order import recorded
from benchmarks.many_workers.simulation import train
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.runner import command, variables

WORKERS = (30, 100)
STEPS = 60
PARTS = 6  # of a run, whose mean losses are compared


@dataclass(frozen=True)
class Comparison:
    """A run of the service and of the simulation, in the same order.

    Attributes:
        workers: How many; each made STEPS commits.
        losses: Mean training loss of each of PARTS parts of the run: of the service, of the simulation.
        accuracies: Share of correct answers on the test data at the end: of the service, of the simulation.
    """

    workers: int
    losses: tuple[list[float], list[float]]
    accuracies: tuple[float, float]


def compare(workers: int, task: Task, data: Path, stored: Path) -> str:
    """Makes both runs and saves what came out. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="gem-many-") as name:
        made = Experiment("mnist", workers=workers, steps=STEPS, turns="random")
        folder = launch(command(made, data, Path(name), processes=2), Path(name) / "output.txt", variables=variables(made))
        real = folder.history()["loss"].reshape(PARTS, -1).mean(axis=1)
        accuracy = json.loads(folder.summary.read_text())["test_accuracy"]
        rows = train(task, Hyperparameters(), recorded(folder.commits), workers, workers * STEPS // PARTS)
    simulated = np.array([row["loss"] for row in rows])
    losses = [[round(float(loss), 4) for loss in each] for each in (real, simulated)]
    found = Comparison(workers, (losses[0], losses[1]), (round(accuracy, 4), round(rows[-1]["accuracy"], 4)))
    write_rows(stored, map(asdict, [*load(stored), found]))
    return str(found)


def load(path: Path) -> list[Comparison]:
    """The stored comparisons."""
    return [Comparison(**each) for each in json.loads(path.read_text())] if path.exists() else []


def checks_table(comparisons: list[Comparison]) -> str:
    """A table of them for the page."""
    rows: list[list[object]] = []
    for each in comparisons:
        for name, losses, accuracy in zip(("service", "simulation"), each.losses, each.accuracies, strict=True):
            shown = ", ".join(f"{loss:.2f}" for loss in losses)
            rows.append([each.workers, name, shown, f"{100 * accuracy:.2f} %"])
    return table(["Workers", "", "Training loss of each sixth of the run", "Test accuracy"], rows)
