"""How settings change a run under AdamW: the measurements behind docs/tuning.md.

Each run is one of gem-train. A result is kept in docs/results/tuning/runs.json and is not measured again. The page and the
picture there are drawn from that file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_worker.tasks.mnist import Mnist
from matplotlib.figure import Figure
from torch import nn

from benchmarks.lib.launch import gem_train
from benchmarks.lib.page import filled, table
from benchmarks.lib.results import Store, plain
from benchmarks.lib.runs import Wanted, study
from benchmarks.lib.style import BLUE, panels, save, styled

RESULTS = Path(__file__).parents[1] / "docs/results/tuning"
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
EPOCHS = 2
BATCH = 64
HIDDEN = 128
CURVE_POINTS = 100
FINAL = 0.1  # share of a run, at its end, that the final loss is the mean of
_RATE = "TUNING_RATE"  # names the variable with the rate of the workers' own AdamW


class Perceptron(Mnist):
    """A perceptron of one hidden layer, 102 thousand parameters: a gradient takes a millisecond."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10), nn.LogSoftmax(1))


class PerceptronOwnAdamW(Perceptron):
    """The same; each worker makes the steps of an AdamW of its own."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=float(os.environ[_RATE]))


@dataclass(frozen=True)
class Choice:
    """The settings of a run; what is not named has the server's default."""

    workers: int
    optimizer: str = "adamw"
    learning_rate: float | None = None  # with optimizer "worker": of each worker's own AdamW
    rule: str = "gem"
    kappa: float | None = None
    local_steps: int = 1
    epochs: int = EPOCHS

    def hyperparameters(self) -> Hyperparameters:
        """The run's settings."""
        given = {name: value for name, value in vars(self).items() if name != "workers" and value is not None}
        if self.optimizer == "worker":
            del given["learning_rate"]
        return Hyperparameters(batch_size=BATCH, **given).with_defaults(given)


@dataclass(frozen=True)
class Run:
    """What is kept of a run, with four digits: its final figures, and curves of at most CURVE_POINTS points."""

    commits: int
    test_accuracy: float
    final_loss: float | None
    staleness: float
    pi_median: float | None
    pi_zero: float | None
    curves: dict[str, Any]  # columns

    def __str__(self) -> str:
        return f"loss {self.final_loss}, accuracy {self.test_accuracy}"


def choices() -> Iterator[Choice]:
    """Every run, those that the page needs most first."""
    yield from (Choice(16, learning_rate=rate) for rate in RATES)
    yield from (Choice(16, learning_rate=1e-3, kappa=kappa) for kappa in (0.1, 12, 0.75, 3))
    yield from (Choice(1, learning_rate=rate) for rate in RATES)
    yield from (Choice(16, learning_rate=rate, rule="downpour") for rate in RATES[:4])
    yield from (Choice(30, learning_rate=rate) for rate in RATES[:4])
    yield from (Choice(workers, learning_rate=1e-3, epochs=8) for workers in (30, 100))
    yield from (Choice(16, "worker", rate, local_steps=steps) for steps in (1, 4) for rate in RATES[1:3])
    yield from (Choice(4, learning_rate=rate) for rate in RATES[1:3])
    yield from (Choice(16, "sgd", rate) for rate in (0.05, 0.5))


def measure(choice: Choice, data: Path) -> Run:
    """Makes a run. Raises RunFailed."""
    task = "PerceptronOwnAdamW" if choice.optimizer == "worker" else "Perceptron"
    with tempfile.TemporaryDirectory(prefix="gem-tuning-") as name:
        folder = gem_train(
            choice.hyperparameters(), f"benchmarks.tuning:{task}", data, choice.workers, Path(name),
            variables={_RATE: str(choice.learning_rate)},
        )  # fmt: skip
        return result(folder.history(), json.loads(folder.summary.read_text())["test_accuracy"])


def result(history: Mapping[str, Any], accuracy: float) -> Run:
    """What is kept of a run with these commits."""
    commits = len(history["loss"])
    means = {name: plain(history[name].mean(), 4) for name in ("staleness", "pi_median", "pi_zero_ratio")}
    chunks = np.array_split(np.arange(commits), min(CURVE_POINTS, commits))
    return Run(
        commits, round(accuracy, 4), plain(history["loss"][-max(1, int(FINAL * commits)) :].mean(), 4),
        means["staleness"] or 0.0, means["pi_median"], means["pi_zero_ratio"],
        {name: [plain(history[name][chunk].mean(), 4) for chunk in chunks] for name in ("version", "loss", "pi_median")},
    )  # fmt: skip


def stored(folder: Path) -> Store[Choice, Run]:
    return Store(folder / "runs.json", "choice", Choice, vars, lambda choice, row: Run(**row))


SHOWN = {
    "healthy:\nrate 0.001, κ 1.5": Choice(16, learning_rate=1e-3),
    "too hot:\nrate 0.03, κ 1.5": Choice(16, learning_rate=3e-2),
    "starved:\nrate 0.001, κ 0.1": Choice(16, learning_rate=1e-3, kappa=0.1),
}  # the rows of the picture


@styled
def figure(runs: Mapping[Choice, Run]) -> Figure:
    """Draws the loss and the median of π of a healthy run, of one that is too hot and of one that starves."""
    title = "AdamW on the server, 16 workers, MNIST, two epochs"
    drawn, places = panels(len(SHOWN), 2, title, 1.7, 6.0, sharex=True, sharey="col")  # read on phones, too
    for (name, choice), loss, pi in zip(SHOWN.items(), places[::2], places[1::2], strict=True):
        curves = runs[choice].curves
        loss.plot(curves["version"], curves["loss"], color=BLUE)
        pi.plot(curves["version"], curves["pi_median"], color=BLUE)
        loss.set(ylabel=name, ylim=(0, 2.5))
        pi.set(ylim=(0, 1))
    places[0].set_title("training loss")
    places[1].set_title("median π of a commit")
    for below in places[-2:]:
        below.set_xlabel("commits")
    return drawn


def by_rate(runs: Mapping[Choice, Run]) -> str:
    """A row for each method and number of workers at its own κ, a column for each rate."""
    usual = {choice: run for choice, run in runs.items() if choice.kappa is None}
    rates = sorted({choice.learning_rate for choice in usual if choice.learning_rate})
    rows: dict[str, dict[float | None, str]] = {}
    order = sorted(usual, key=lambda c: (c.rule != "gem", c.optimizer, c.local_steps, c.workers, c.epochs))
    for choice in order:
        rows.setdefault(_name(choice), {})[choice.learning_rate] = _cell(choice, usual[choice])
    heads = ["Rule, optimizer, workers", *(f"{rate:g}" for rate in rates)]
    return table(heads, ([name, *(cells.get(rate, "") for rate in rates)] for name, cells in rows.items()))


def by_kappa(runs: Mapping[Choice, Run]) -> str:
    """Of gem around AdamW with 16 workers at the usual rate: a column for each κ."""
    tried = [Choice(16, learning_rate=1e-3), *(choice for choice in runs if choice.kappa is not None)]
    found = {choice.hyperparameters().kappa: choice for choice in tried if choice in runs}
    cells = [_cell(found[kappa], runs[found[kappa]]) for kappa in sorted(found)]
    return table(["κ", *(f"{kappa:g}" for kappa in sorted(found))], [["gem adamw, 16", *cells]])


def _cell(choice: Choice, run: Run) -> str:
    """The accuracy, and under energy matching the median of π."""
    pi = f" ({run.pi_median:.2f})" if choice.rule == "gem" and run.pi_median is not None else ""
    return f"{100 * run.test_accuracy:.2f}{pi}"


def _name(choice: Choice) -> str:
    more = f", λ {choice.local_steps}" * (choice.local_steps > 1) + f", {choice.epochs} epochs" * (choice.epochs != EPOCHS)
    return f"{choice.rule} {choice.optimizer}, {choice.workers}{more}"


def draw(folder: Path) -> Path:
    """Writes README.md and, if its runs are there, curves.png. Returns the page's path."""
    runs = stored(folder)
    if all(choice in runs for choice in SHOWN.values()):
        save(figure(runs), folder / "curves.png")
    return filled(
        Path(__file__).with_suffix(".txt"), folder / "README.md",
        rates=by_rate(runs), kappas=by_kappa(runs), batch=BATCH,
        parameters=f"{784 * HIDDEN + HIDDEN + HIDDEN * 10 + 10:,}",
    )  # fmt: skip


def plan(parts: Sequence[str], data: Path | None) -> Wanted:
    runs = stored(RESULTS)
    for choice in choices():
        if data is not None:
            yield runs, choice, partial(measure, choice, data)


about = "Makes the runs that have no result yet, if --data names MNIST, then draws the page and the picture."
main = study(about, (), plan, draw, RESULTS)

if __name__ == "__main__":
    main()
