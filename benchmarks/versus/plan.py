"""Which runs are wanted, in the order of their value. What later ones want depends on the rates that earlier ones chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from benchmarks.versus.contenders import contenders
from benchmarks.versus.models import GOALS
from benchmarks.versus.outcome import Outcome, Run
from benchmarks.versus.profiles import PROFILES

BASE = "ddp"  # what the others are compared with
RATE_SEED, RATE_PROFILE = 100, "equal"  # rates are chosen here
WIDTHS = (8, 16, 4)  # in the order of measuring
ONE_WORKER = {"adamw": 0.003, "sgd": 0.05}  # rates that suit one worker
QUICK_RATES = {"ddp": 0.01, "gem": 0.003}
_MAX_EXTENSION = 3  # rates added beyond each end

Results = Callable[[Run], Outcome | None]


@dataclass(frozen=True)
class Case:
    """A contender with a model and a number of workers: it has one best rate."""

    contender: str
    model: str
    workers: int

    def run(self, profile: str, rate: float, seed: int) -> Run:
        return Run(self.contender, self.model, self.workers, profile, rate, seed)

    def possible(self, profile: str) -> bool:
        """Whether the contender can have such a cluster."""
        return contenders()[self.contender].far or not PROFILES[profile].far

    @property
    def optimizer(self) -> str:
        return GOALS[self.model].optimizer


@dataclass(frozen=True)
class Choice:
    """What a command is asked for; empty: everything.

    Attributes:
        only, models, profiles: Names of contenders, models and profiles.
        widths: Numbers of workers.
        seeds: Number of seeds for each profile.
        quick: Whether the rates are given instead of chosen.
    """

    only: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    seeds: int = 3
    quick: bool = field(default=False, kw_only=True)

    def groups(self) -> list[list[Case]]:
        """The cases that are compared with each other, most valuable first. Contenders of one width come last."""
        everywhere = {name for name, each in contenders().items() if len(each.widths) > 1}
        found = [
            [Case(name, model, width) for name, each in contenders().items() if width in each.widths and name in names]
            for names in (everywhere, contenders().keys() - everywhere)
            for model in self.models or GOALS
            for width in self.widths or WIDTHS
        ]
        asked = self.only or {name for name, each in contenders().items() if each.start is not None}
        kept = [[case for case in group if case.contender in asked] for group in found]
        return [group for group in kept if group]

    def kinds(self, skipped: Sequence[str] = ()) -> list[str]:
        return [name for name in PROFILES if (name in self.profiles or not self.profiles) and name not in skipped]


def merit(outcome: Outcome) -> tuple[float, float]:
    """How soon the lower loss was reached; if it was not, how low the loss came. Lower is better."""
    lowest = math.inf if outcome.diverged or outcome.lowest is None else outcome.lowest
    return (math.inf if outcome.units[1] is None else outcome.units[1]), lowest


def rates(case: Case, results: Results) -> list[float]:
    """The rates that a case is tried at, ascending. They go on while the best of them is the outermost."""
    found = list(contenders()[case.contender].rates[case.optimizer])
    lowest = highest = _MAX_EXTENSION
    while (best := _best_of(case, found, results)) is not None:
        if best == found[0] and lowest:
            found.insert(0, float(f"{found[0] ** 2 / found[1]:.1g}"))
            lowest -= 1
        elif best == found[-1] and highest:
            found.append(float(f"{found[-1] ** 2 / found[-2]:.1g}"))
            highest -= 1
        else:
            break
    return found


def best_rate(case: Case, results: Results) -> float | None:
    """None until all rates are measured, or if none has a result."""
    return _best_of(case, rates(case, results), results)


def _best_of(case: Case, tried: list[float], results: Results) -> float | None:
    merits = {rate: merit(found) for rate in tried if (found := results(case.run(RATE_PROFILE, rate, RATE_SEED))) is not None}
    if len(merits) < len(tried):
        return None
    best = min(merits, key=merits.__getitem__)
    return best if min(merits[best]) < math.inf else None


def wanted(choice: Choice, results: Results, skipped: Sequence[str] = ()) -> Iterator[Run]:
    """The runs that are wanted so far, those with a result included.

    Args:
        choice: What is asked for.
        results: The results so far.
        skipped: Profiles that this machine can't have.
    """
    for group in choice.groups():
        if not choice.quick:
            for case in group:
                yield from (case.run(RATE_PROFILE, rate, RATE_SEED) for rate in rates(case, results))
        best = {case: QUICK_RATES.get(case.contender) if choice.quick else best_rate(case, results) for case in group}
        chosen = {case: rate for case, rate in best.items() if rate is not None}
        one_workers = {} if choice.quick else {case: ONE_WORKER[case.optimizer] for case in group}
        for each in (chosen, one_workers):
            for seed, profile in product(range(choice.seeds), choice.kinds(skipped)):
                yield from (case.run(profile, rate, seed) for case, rate in each.items() if case.possible(profile))


def missing(choice: Choice, results: Results, skipped: Sequence[str] = ()) -> Iterator[Run]:
    """The wanted runs without a result, one at a time: the next is chosen by the results so far. Each is tried once."""
    tried: set[Run] = set()
    while run := next((each for each in wanted(choice, results, skipped) if each not in tried and results(each) is None), None):
        tried.add(run)
        yield run
