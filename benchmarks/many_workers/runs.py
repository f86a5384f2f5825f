"""The runs of the page, and their stored results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gem_worker.tasks import Task

from benchmarks.lib.results import Store, plain
from benchmarks.many_workers.order import simulated
from benchmarks.many_workers.simulation import Row, train
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import AT_RANDOM, LOCKSTEP

STEPS = 60  # of each worker: the unstable part of a run is over by then
SEEDS = (0, 1)
SPREADS = (0.05, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
COUNTS = (10, 30, 100, 300)
AGAINST = (1.0, 0.5)


def experiment(against: float = 1.0, proxy: str = "", **changes: Any) -> Experiment:
    """A simulated run; what is not named is as in most: 100 workers in lockstep, under the paper's rule."""
    options = f"against={against:g}" + f" proxy={proxy}" * bool(proxy)
    common = {"workers": 100, "steps": STEPS, "spread": LOCKSTEP, "rule_options": options, "setting": "simulated"}
    return Experiment("mnist", **{**common, **changes})


@dataclass(frozen=True)
class Run:
    """A case and the rows of its result."""

    case: Experiment
    rows: list[Row]

    def __str__(self) -> str:
        return f"leap {self.leap:.2f}, accuracy {100 * self.accuracy:.2f} %"

    def column(self, name: str) -> list[float]:
        """The values of a column; NaN where a row lacks it."""
        return [row.get(name, math.nan) for row in self.rows]

    @property
    def rounds(self) -> list[float]:
        """The commits of each worker at each row, on average."""
        return [version / self.case.workers for version in self.column("version")]

    @property
    def leap(self) -> float:
        """How far the training loss rises above what it had been down to; infinity if training diverged."""
        losses = np.array(self.column("loss"))
        if not np.isfinite(losses).all():
            return math.inf
        return float((losses - np.minimum.accumulate(losses)).max())

    @property
    def accuracy(self) -> float:
        """Share of correct answers on the test data at the end."""
        return self.rows[-1].get("accuracy", math.nan)


Runs: TypeAlias = Mapping[Experiment, Run]


def under_all_seeds(runs: Runs, case: Experiment) -> list[Run]:
    """The runs of a case under every seed, as far as they are there."""
    return [runs[one] for seed in SEEDS if (one := replace(case, seed=seed)) in runs]


def mean_leap(runs: Runs, case: Experiment) -> float:
    return float(np.mean([run.leap for run in under_all_seeds(runs, case)]))


REMEDIES = {
    "the paper's rule": experiment(),
    "against = 0.5": experiment(against=0.5),
    "batches from 10 to 190 %": experiment(batch_variation=0.9),
    "both": experiment(batch_variation=0.9, against=0.5),
    "κ = 0.3": experiment(kappa=0.3),
    "η = 0.02": experiment(learning_rate=0.02),
    "μ = 0.5": experiment(momentum=0.5),
    "π at most 1": experiment(pi_max=1),
    "`proxy=global`": experiment(proxy="global"),
}


def order_cases() -> list[Experiment]:
    """The runs about the order of commits and what holds; the first seed of all before the second."""
    cases = [experiment(spread=spread, against=against) for spread in SPREADS for against in AGAINST]
    return list(dict.fromkeys(replace(case, seed=seed) for seed in SEEDS for case in [*cases, *REMEDIES.values()]))


def number_cases() -> list[Experiment]:
    """The runs about the number of workers."""
    return [
        experiment(workers=n, spread=spread, seed=seed) for n in COUNTS for seed in SEEDS for spread in (LOCKSTEP, AT_RANDOM)
    ]


def measure(case: Experiment, task: Task) -> Run:
    """Makes a run."""
    return Run(case, train(task, case.hyperparameters(), simulated(case), case.workers, case.workers))


def stored(folder: Path) -> Store[Experiment, Run]:
    """The stored results, with four digits."""
    return Store(
        folder / "runs.json",
        "experiment",
        Experiment,
        lambda run: {"columns": _columns(run)},
        lambda case, row: Run(case, _rows(row["columns"])),
    )


def _columns(run: Run) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in run.rows for name in row)
    return {name: [plain(value, 4) for value in run.column(name)] for name in names}


def _rows(columns: dict[str, list[float | None]]) -> list[Row]:
    return [
        {name: math.nan if value is None else value for name, value in zip(columns, values, strict=True)}
        for values in zip(*columns.values(), strict=True)
    ]
