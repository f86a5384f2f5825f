"""Figures that page and plot share: the time to each loss over the seeds, at the best rate and at one worker's."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.versus.outcome import Outcome
from benchmarks.versus.plan import BASE, QUICK_RATES, RATE_PROFILE, Case, Results, best_rate

SEEDS = 10  # more than anybody measures


@dataclass(frozen=True)
class Cell:
    """A contender in a kind of cluster: its outcomes under the seeds measured so far.

    Attributes:
        rate: The learning rate.
        outcomes: By seed.
    """

    rate: float
    outcomes: dict[int, Outcome]

    def times(self, which: int) -> list[float]:
        """The units until a loss (0: the higher, 1: the lower), under each seed that reached it."""
        return [units for each in self.outcomes.values() if (units := each.units[which]) is not None]

    def mean(self, which: int) -> float | None:
        """The mean of the times; None unless every seed has reached the loss."""
        times = self.times(which)
        return sum(times) / len(times) if times and len(times) == len(self.outcomes) else None

    def mean_samples(self, which: int) -> float | None:
        samples = [count for each in self.outcomes.values() if (count := each.samples[which]) is not None]
        return sum(samples) / len(samples) if samples and len(samples) == len(self.outcomes) else None


def tuned(case: Case, results: Results) -> float | None:
    """The best rate; if rates were not searched for, the given one, else DDP's."""
    return best_rate(case, results) or QUICK_RATES.get(case.contender) or best_rate(base_of(case), results)


def cell(case: Case, profile: str, rate: float | None, results: Results) -> Cell | None:
    """None if nothing is measured."""
    if rate is None:
        return None
    found = {seed: outcome for seed in range(SEEDS) if (outcome := results(case.run(profile, rate, seed))) is not None}
    return Cell(rate, found) if found else None


def ratio(mine: Cell | None, base: Cell | None, which: int) -> float | None:
    """The mean time of one divided by that of the other, for seeds that both have; None if one has not reached the loss."""
    if mine is None or base is None:
        return None
    pairs = [
        (mine.outcomes[seed].units[which], base.outcomes[seed].units[which]) for seed in mine.outcomes if seed in base.outcomes
    ]
    reached = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not reached or len(reached) < len(pairs):
        return None
    return sum(one for one, _ in reached) / sum(other for _, other in reached)


def fast_alone(case: Case, profile: str, results: Results) -> Cell | None:
    """The fast workers of a cluster alone, as far as they are measured: half of `mixed`, and of `straggler` one more than
    there are."""
    workers = {"mixed": case.workers // 2, "straggler": case.workers}.get(profile)
    if workers is None:
        return None
    alone = Case(case.contender, case.model, workers)
    return cell(alone, RATE_PROFILE, tuned(alone, results), results)


def base_of(case: Case) -> Case:
    """DDP with the same model and workers."""
    return Case(BASE, case.model, case.workers)
