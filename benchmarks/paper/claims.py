"""The paper's claims, the measurements, and whether they agree: all computed from the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from benchmarks.lib.page import count
from benchmarks.paper import statistics as stats
from benchmarks.paper.content import TARGET_LOSS, TARGET_WINDOW
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import AT_RANDOM, PAPERS_STEPS, PAPERS_WORKERS
from benchmarks.paper.results import Result

PAPERS_ACCURACY = 0.9938
_ACCURACY_MARGIN = 0.001  # how far below the paper's accuracy a mean may be and still be called the same
_SAME = 1.1  # losses within this factor are the same, with noise
_CLOSE = 1.5  # losses within this factor are close
_POINT = 0.002  # an accuracy at most this much lower counts as the same
_KAPPA, _LARGER_KAPPA = 1.0, 4.0  # the paper's own, and the one that it calls suboptimal
_PAPERS_PI = (30, 0.08)  # from Fig. 3: a number of workers, and its median π
_FACTOR = 2.0  # a π within this factor counts as the same


class Agreement(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "**no**"
    UNKNOWN = "not comparable"


@dataclass(frozen=True)
class Verdict:
    """A sentence about the measurement, and whether the claim holds."""

    measured: str
    agrees: Agreement


@dataclass(frozen=True)
class Claim:
    """A claim about a figure, and how it is judged: None where what it needs has not been run."""

    figure: str
    text: str
    judge: Callable[[list[stats.Measured]], Verdict | None]


def _yes(holds: bool) -> Agreement:
    return Agreement.YES if holds else Agreement.NO


def _of(measured: list[stats.Measured], rule: str) -> list[stats.Measured]:
    """The lines of one rule, from the fewest workers to the most."""
    return _by_workers([each for each in measured if each.experiment.rule == rule])


def _by_workers(measured: list[stats.Measured]) -> list[stats.Measured]:
    return sorted(measured, key=lambda each: each.experiment.workers)


def _with_most_workers(measured: list[stats.Measured], *rules: str) -> dict[str, stats.Measured] | None:
    """Each rule's line with the most workers that any of them has; None where one has no such line."""
    most = max((each.experiment.workers for each in measured if each.experiment.rule in rules), default=0)
    lines = {each.experiment.rule: each for each in measured if each.experiment.workers == most}
    return {rule: lines[rule] for rule in rules} if lines.keys() >= set(rules) else None


def _find(measured: list[stats.Measured], fits: Callable[[Experiment], bool]) -> stats.Measured | None:
    """The line with such settings; None where it was not run."""
    return next((each for each in measured if fits(each.experiment)), None)


def _losses(measured: Sequence[stats.Measured]) -> str:
    """Final losses by number of workers."""
    return "; ".join(_at(each, stats.final_loss(each.results).text()) + _failures(each) for each in measured)


def _failures(each: stats.Measured) -> str:
    """The number of failed runs, as text to append; empty if none failed."""
    bad = stats.failed(each.results)
    return f", {bad} of {len(each.results)} runs failed" if bad else ""


def _at(each: stats.Measured, value: str) -> str:
    n = each.experiment.workers
    return f"{count(n)}: {value}"


def _worst(each: stats.Measured) -> float:
    """The mean final loss, infinite where a run did not learn."""
    return math.inf if stats.failed(each.results) else stats.final_loss(each.results).mean


def gem_learns(measured: list[stats.Measured]) -> Verdict | None:
    mine = _of(measured, "gem")
    if not mine:
        return None
    return Verdict(f"final loss with {_losses(mine)}", _yes(not any(stats.failed(each.results) for each in mine)))


def downpour_degrades(measured: list[stats.Measured]) -> Verdict | None:
    mine, most = _of(measured, "downpour"), _with_most_workers(measured, "downpour", "gem")
    if len(mine) < 2 or most is None:
        return None
    worse = _worst(mine[-1]) > _SAME * _worst(mine[0]) and _worst(mine[-1]) > _SAME * _worst(most["gem"])
    return Verdict(f"final loss with {_losses(mine)}, test accuracy {_percent(mine[-1])}", _yes(worse))


def adaptive_between(measured: list[stats.Measured]) -> Verdict | None:
    most = _with_most_workers(measured, "gem", "adaptive", "downpour")
    if most is None:
        return None
    order = [_worst(each) for each in most.values()]
    agrees = Agreement.YES if order[0] < order[1] < order[2] else Agreement.PARTLY if order[0] < order[1] else Agreement.NO
    words = "; ".join(f"{rule} {_percent(each)}, loss {stats.final_loss(each.results).text()}" for rule, each in most.items())
    return Verdict(f"{most['gem'].experiment.workers} workers, test accuracy and final loss: {words}", agrees)


def hundred_workers(measured: list[stats.Measured]) -> Verdict | None:
    if not measured:
        return None
    (each,) = measured
    found, run = stats.accuracy(each.results), each.experiment
    text = f"{_percent(each)} with {run.workers} workers, {run.steps} steps each{_failures(each)}"
    if (run.task, run.workers, run.steps) != ("mnist", PAPERS_WORKERS, PAPERS_STEPS):
        return Verdict(text, Agreement.UNKNOWN)
    return Verdict(
        text, _yes(found.count > 0 and not stats.failed(each.results) and found.mean >= PAPERS_ACCURACY - _ACCURACY_MARGIN)
    )


def pi_falls_with_workers(measured: list[stats.Measured]) -> Verdict | None:
    if len(measured) < 2:
        return None
    ordered = _by_workers(measured)
    values = [stats.mean_pi(each.results) for each in ordered]
    parts = [_at(each, value.text()) for each, value in zip(ordered, values, strict=True)]
    falls = all(after.mean < before.mean for before, after in pairwise(values))
    return Verdict(f"mean of the median π with {'; '.join(parts)}", _yes(falls))


def pi_as_the_papers(measured: list[stats.Measured]) -> Verdict | None:
    workers, papers = _PAPERS_PI
    mine = _find(measured, lambda run: run.workers == workers)
    if mine is None:
        return None
    value = stats.mean_pi(mine.results)
    return Verdict(_at(mine, value.text()), _yes(papers / _FACTOR <= value.mean <= papers * _FACTOR))


def same_data(measured: list[stats.Measured]) -> Verdict | None:
    alone = _find(measured, lambda run: run.workers == 1)
    if alone is None or len(measured) < 2:
        return None
    close = max(map(_worst, measured)) <= _CLOSE * _worst(alone) < math.inf
    return Verdict(f"final loss with {_losses(measured)}", _yes(close))


def less_time(measured: list[stats.Measured]) -> Verdict | None:
    if len(measured) < 2:
        return None
    ordered = _by_workers(measured)
    times = [stats.spread(stats.seconds_to(result, TARGET_LOSS, TARGET_WINDOW) for result in each.results) for each in ordered]
    parts = [
        _at(each, f"{time.text('{:.1f}')} s" if time.count else "never") for each, time in zip(ordered, times, strict=True)
    ]
    reached = [time.mean if time.count == len(each.results) else math.inf for each, time in zip(ordered, times, strict=True)]
    falls = all(after < before for before, after in pairwise(reached))
    return Verdict(f"simulated time to a loss of {TARGET_LOSS} with {'; '.join(parts)}", _yes(falls))


def against_sequential(column: Callable[[Result], float]) -> Callable[[list[stats.Measured]], Verdict | None]:
    """Judges GEM's loss at the end against the sequential baseline's."""

    def judge(measured: list[stats.Measured]) -> Verdict | None:
        gem, base = _find(measured, lambda run: run.rule == "gem"), _find(measured, lambda run: run.rule == "momentum")
        if gem is None or base is None:
            return None
        ours, theirs = (stats.spread(column(result) for result in each.results) for each in (gem, base))
        text = f"GEM with {_at(gem, ours.text())}{_failures(gem)}; sequential: {theirs.text()}{_failures(base)}"
        return Verdict(text, _yes(not stats.failed(gem.results) and ours.mean <= _SAME * theirs.mean))

    return judge


def _validation_loss(result: Result) -> float:
    return math.nan if result.test_loss is None else result.test_loss


def downpour_fails(measured: list[stats.Measured]) -> Verdict | None:
    most = _with_most_workers(measured, "downpour", "gem")
    if most is None:
        return None
    gem, other = most["gem"], most["downpour"]
    bad = stats.failed(other.results)
    agrees = Agreement.YES if bad > len(other.results) / 2 else Agreement.PARTLY if bad else Agreement.NO
    text = f"{_percent(other)}, {bad} of {len(other.results)} failed; GEM {_percent(gem)}"
    return Verdict(_at(gem, text), agrees)


def kappa_helps(measured: list[stats.Measured]) -> Verdict | None:
    """For each number of workers, the κ with the lowest loss lies between 1 and the one that the paper calls suboptimal."""
    counts = _counts(measured)
    if not any(_KAPPA < each.experiment.kappa < _LARGER_KAPPA for each in measured):
        return None
    best = [min(_with(measured, n), key=_worst).experiment.kappa for n in counts]
    words = "; ".join(f"{count(n)}: lowest with κ = {kappa:g}" for n, kappa in zip(counts, best, strict=True))
    return Verdict(words, _for_all(_KAPPA < kappa < _LARGER_KAPPA for kappa in best)) if counts else None


def larger_kappa_is_worse(measured: list[stats.Measured]) -> Verdict | None:
    worse, words = [], []
    for n in _counts(measured):
        mine = _with(measured, n)
        larger = _find(mine, lambda run: run.kappa == _LARGER_KAPPA)
        others = [each for each in mine if each is not larger]
        if larger is None or not others:
            return None
        worse.append(_worst(larger) > _SAME * min(map(_worst, others)))
        losses = [f"κ = {each.experiment.kappa:g}: {stats.final_loss(each.results).text()}{_failures(each)}" for each in mine]
        words.append(f"{count(n)}: {', '.join(losses)}")
    return Verdict("; ".join(words), _for_all(worse)) if words else None


def larger_kappa_larger_pi(measured: list[stats.Measured]) -> Verdict | None:
    rises, words = [], []
    for n in _counts(measured):
        values = [stats.mean_pi(each.results) for each in _with(measured, n)]
        rises.append(all(after.mean > before.mean for before, after in pairwise(values)))
        words.append(f"{count(n)}: {', '.join(value.text() for value in values)}")
    return Verdict("; ".join(words), _for_all(rises)) if words else None


def _counts(measured: list[stats.Measured]) -> list[int]:
    """The numbers of workers that have more than one line."""
    counts = [each.experiment.workers for each in measured]
    return sorted({n for n in counts if counts.count(n) > 1})


def _with(measured: list[stats.Measured], n: int) -> list[stats.Measured]:
    """The lines of n workers, from the smallest κ to the largest."""
    return sorted((each for each in measured if each.experiment.workers == n), key=lambda each: each.experiment.kappa)


def _for_all(holds: Iterable[bool]) -> Agreement:
    found = list(holds)
    return Agreement.YES if all(found) else Agreement.PARTLY if any(found) else Agreement.NO


def tensors_differ(measured: list[stats.Measured]) -> Verdict | None:
    means = {each.label: mean for each in measured if (mean := _tensor_means(each))}
    if not means:
        return None
    words = []
    for label, mean in means.items():
        low, high = min(mean, key=lambda name: mean[name]), max(mean, key=lambda name: mean[name])
        words.append(f"{label}: from {mean[low]:.3f} ({low}) to {mean[high]:.3f} ({high})")
    return Verdict("; ".join(words), _yes(all(max(mean.values()) > 1.2 * min(mean.values()) for mean in means.values())))


def _tensor_means(each: stats.Measured) -> dict[str, float]:
    names = [name for name in each.results[0].tensors if name != "version"]
    return {name: float(np.nanmean(np.concatenate([run.tensors[name] for run in each.results]))) for name in names}


def costs_at_most(drop: float, changed: Callable[[Experiment], bool]) -> Callable[[list[stats.Measured]], Verdict | None]:
    """Judges whether GEM's accuracy with a changed setting is at most so far below that with the usual ones."""

    def judge(measured: list[stats.Measured]) -> Verdict | None:
        mine = _of(measured, "gem")
        usual, other = _find(mine, _usual), _find(mine, changed)
        if usual is None or other is None:
            return None
        before, after = stats.accuracy(usual.results), stats.accuracy(other.results)
        text = "; ".join(f"{each.label}: {_percent(each)}{_failures(each)}" for each in mine)
        held = _known(before, after) and after.mean >= before.mean - drop and not stats.failed(other.results)
        return Verdict(text, _yes(held))

    return judge


def more_workers_learn_more(measured: list[stats.Measured]) -> Verdict | None:
    """Of GEM's workers whose times vary: in as many steps, more of them get further."""
    mine = _by_workers([each for each in _of(measured, "gem") if each.experiment.spread == AT_RANDOM])
    if len(mine) < 2:
        return None
    values = [stats.accuracy(each.results) for each in mine]
    rises = all(after.mean > before.mean for before, after in pairwise(values))
    text = "; ".join(_at(each, _percent(each)) for each in mine)
    return Verdict(text, _yes(rises and _known(*values) and not any(stats.failed(each.results) for each in mine)))


def _usual(run: Experiment) -> bool:
    """Workers of equal speed that stay, and GEM's own proxy."""
    return (run.slowdown, run.replacements, run.rule_options) == (1.0, 0, "")


def _known(*values: stats.Spread) -> bool:
    return all(value.count for value in values)


def _percent(each: stats.Measured) -> str:
    return f"{stats.accuracy(each.results).text('{:.2f}', 100)} %"


PAPER = (
    Claim("1", "GEM's loss falls with any number of workers", gem_learns),
    Claim("1", "DOWNPOUR gets worse, or diverges, as workers are added", downpour_degrades),
    Claim("1", "Adaptive staleness lies between the two", adaptive_between),
    Claim("2", "99.38 % test accuracy with 100 workers, 937 steps each", hundred_workers),
    Claim("3", "The more workers, the smaller the median π …", pi_falls_with_workers),
    Claim("3", "… about 0.08 with 30", pi_as_the_papers),
    Claim("4", "A batch split over more workers: the loss over the data stays close …", same_data),
    Claim("4", "… and the time to a loss falls", less_time),
    Claim(
        "5",
        "GEM's training loss per data epoch is that of sequential momentum SGD, or lower …",
        against_sequential(stats.final),
    ),
    Claim("5", "… and so is its validation loss", against_sequential(_validation_loss)),
    Claim("6", "At η = 0.1 GEM adapts …", gem_learns),
    Claim("6", "… where DOWNPOUR diverges", downpour_fails),
    Claim("8", "The loss improves with κ …", kappa_helps),
    Claim("8", "… until 4, which is suboptimal, or diverges", larger_kappa_is_worse),
    Claim("8", "A larger κ gives a larger median π", larger_kappa_larger_pi),
    Claim("9-10", "π differs between tensors (AlexNet's there, this network's here)", tensors_differ),
)  # fmt: skip
OURS = (
    Claim(
        "straggler",
        "GEM loses at most 0.5 points where one worker is ten times slower",
        costs_at_most(0.005, lambda run: run.slowdown > 1),
    ),
    Claim(
        "churn",
        "GEM loses at most 0.5 points where workers come and go all the time",
        costs_at_most(0.005, lambda run: run.replacements > 0),
    ),
    Claim(
        "proxies",
        "A global proxy is at most 0.2 points below one for each worker",
        costs_at_most(_POINT, lambda run: run.rule_options == "proxy=global"),
    ),
    Claim("beyond", "If times vary, more workers take GEM further in the same number of steps", more_workers_learn_more),
)
