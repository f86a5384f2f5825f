"""Compares what training reaches with the formats of gradients and θ on the network: `python -m benchmarks.formats --data DIR`.

Ten simulated workers in one process, in random order, with the server's own rule and the codecs of the SDK and the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
from gem_api.framing import ChunkView
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Vector
from gem_api.wire import WIRE_FORMATS, Format, ThetaFormat
from gem_api.worker_theta import WorkerTheta
from gem_worker.tasks import load_task

from benchmarks.lib.results import Store
from benchmarks.lib.runs import Wanted, study
from benchmarks.many_workers.order import simulated
from benchmarks.many_workers.simulation import train
from benchmarks.paper.experiments import Experiment

RESULTS = Path(__file__).parents[1] / "docs/results"
WORKERS = 10
PAIRS = ("float32/float32", "bfloat16/bfloat16", "int8/bfloat16", "int8/int8")
# The task, its optimizer, the rate, and the steps of each worker.
TASKS = {
    "MNIST": ("mnist", "sgd", 0.05, 300),
    "transformer": ("examples.character_transformer.task:Characters", "adamw", 0.001, 100),
}
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    """A run: a task of `TASKS`, the formats of gradients and θ, and the seed."""

    task: str
    formats: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Held-out loss and accuracy at the end."""

    loss: float
    accuracy: float


class Wires:
    """The network of all workers, in a format for gradients and one for θ, for P parameters."""

    def __init__(self, formats: str, size: int) -> None:
        self._gradient, self._theta = (WIRE_FORMATS[name] for name in formats.split("/"))
        self._encoders = [self._gradient.encoder(size) for _ in range(WORKERS)]
        self._held = [(WorkerTheta(size), WorkerTheta(size)) for _ in range(WORKERS)]

    def down(self, worker: int, theta: Vector) -> Vector:
        if isinstance(self._theta, ThetaFormat):
            return _carried(self._theta, theta, self._theta)
        server, there = self._held[worker]
        known = server.sequence > 0
        return _carried(server.next_format(server.sequence + 1, known), theta, there.next_format(server.sequence + 1, known))

    def up(self, worker: int, update: Vector) -> Vector:
        arrived = np.empty_like(update)
        data = b"".join(piece.tobytes() for piece in self._encoders[worker].pieces(update))
        self._gradient.assembly(arrived).add_all(memoryview(data))
        self._encoders[worker].applied()
        return arrived


def _carried(form: ThetaFormat, theta: Vector, there: Format) -> Vector:
    arrived, begin = np.empty_like(theta), 0
    assembly = there.assembly(arrived)
    for piece in form.pieces(theta):
        assembly.add(ChunkView(begin, piece.data))
        begin += piece.size
    return arrived


def measure(case: Case, data: Path | None) -> Outcome:
    """Makes a run. Raises TaskError."""
    name, optimizer, rate, steps = TASKS[case.task]
    task = load_task(name, data if name == "mnist" else None)
    size = sum(each.numel() for each in task.model().parameters())
    settings = Hyperparameters(rule="gem", optimizer=optimizer, learning_rate=rate, seed=case.seed)
    order = Experiment(name, "gem", WORKERS, steps, case.seed, setting="simulated", spread=1.0)
    rows = train(task, settings, simulated(order), WORKERS, WORKERS * steps, wire=Wires(case.formats, size))
    return Outcome(rows[-1]["test_loss"], rows[-1]["accuracy"])


def stored(folder: Path) -> Store[Case, Outcome]:
    return Store(folder / "formats.json", "case", Case, vars, lambda case, row: Outcome(**row))


def plan(tasks: Sequence[str], data: Path | None) -> Wanted:
    store = stored(RESULTS)
    for case in (Case(task, pair, seed) for seed in SEEDS for task in tasks for pair in PAIRS):
        if data is not None or case.task != "MNIST":
            yield store, case, partial(measure, case, data)


def show(folder: Path) -> Path:
    """Prints the table."""
    store = stored(folder)
    click.echo("task          gradients/θ          loss, each seed            accuracy, %, each seed")
    for task in TASKS:
        for pair in PAIRS:
            cases = [Case(task, pair, seed) for seed in SEEDS]
            found = [store[case] for case in cases if case in store]
            losses = "  ".join(f"{each.loss:.4f}" for each in found)
            click.echo(f"{task:12}  {pair:19}  {losses:26} {'  '.join(f'{100 * each.accuracy:.2f}' for each in found)}")
    return store.path


about = "Makes the runs that have no result yet, then prints the table. All take half an hour on one core."
main = study(about, TASKS, plan, show, RESULTS)

if __name__ == "__main__":
    main()
