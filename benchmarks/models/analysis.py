"""Figures that the page and the plots share: each case at its best rate, over the seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.models.plan import SEEDS, Results, at_the_end, best, grid, kappas, seeds
from benchmarks.models.runs import Outcome, Run
from benchmarks.paper.statistics import Spread, spread


@dataclass(frozen=True)
class Summary:
    """Losses of the same settings under several seeds.

    Attributes:
        loss: Over the seeds that did not diverge.
        outcomes: Of all seeds measured so far.
    """

    loss: Spread
    outcomes: list[Outcome]

    @property
    def diverged(self) -> int:
        return sum(math.isinf(each.loss) for each in self.outcomes)

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == len(SEEDS)


@dataclass(frozen=True)
class Case:
    """A method with a number of workers, as far as it is measured.

    Attributes:
        case: Its settings; the learning rate means nothing.
        tried, planned: Learning rates measured so far, and those wanted so far.
        best: The run at the best rate, first seed; None if rates are missing, or if all diverged.
        at_the_end: Whether that rate is the lowest or the highest tried.
        so_far: The best loss of the rates tried; infinity if all diverged, NaN if there is none.
        summary: At the best rate; without outcomes while that is not known.
    """

    case: Run
    tried: int
    planned: int
    best: Run | None
    at_the_end: bool
    so_far: float
    summary: Summary


def summary(runs: list[Run], results: Results) -> Summary:
    """Of the runs that have a result."""
    outcomes = [outcome for run in runs if (outcome := results(run)) is not None]
    return Summary(spread(each.loss for each in outcomes), outcomes)


def measured(case: Run, results: Results) -> Case:
    runs = grid(case, results)
    losses = [outcome.loss for run in runs if (outcome := results(run)) is not None]
    found = best(case, results)
    return Case(
        case, len(losses), len(runs), found, found is not None and at_the_end(found, results), min(losses, default=math.nan),
        summary(seeds(case, results), results),
    )  # fmt: skip


def by_rate(case: Run, results: Results) -> list[tuple[float, Summary]]:
    """Each rate of the case's grid that has results, lowest first."""
    found = ((run.rate, summary([replace(run, seed=seed) for seed in SEEDS], results)) for run in grid(case, results))
    return [(rate, each) for rate, each in found if each.outcomes]


def by_kappa(case: Run, results: Results) -> dict[float, Summary]:
    """At the best rate; empty until that is known."""
    runs = kappas(case, results)
    values = dict.fromkeys(run.kappa for run in runs if run.kappa is not None)
    return {kappa: summary([run for run in runs if run.kappa == kappa], results) for kappa in values}


def difference(mine: Summary, other: Summary) -> tuple[float, bool] | None:
    """Mean loss of one minus that of the other, and whether the ranges over the seeds are apart. None unless all seeds of both
    are measured; minus or plus infinity if only the other, or only the first, diverged under every seed."""
    if not (mine.complete and other.complete):
        return None
    if not mine.loss.count or not other.loss.count:
        return (math.nan if mine.loss.count == other.loss.count else math.inf if not mine.loss.count else -math.inf), True
    apart = mine.loss.high < other.loss.low or other.loss.high < mine.loss.low
    return mine.loss.mean - other.loss.mean, apart
