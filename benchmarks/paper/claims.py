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
from benchmarks.paper.results import Array, Result
from benchmarks.paper.statistics import Measured

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


Lines = list[Measured]
Judge = Callable[[Lines], Verdict | None]


@dataclass(frozen=True)
class Claim:
    """A claim about a figure, and how it is judged: None where what it needs has not been run."""

    figure: str
    text: str
    judge: Judge


def _yes(holds: bool) -> Agreement:
    return Agreement.YES if holds else Agreement.NO


def _for_all(holds: Iterable[bool]) -> Agreement:
    found = list(holds)
    return Agreement.YES if all(found) else Agreement.PARTLY if any(found) else Agreement.NO


def _falls(values: Sequence[float]) -> bool:
    return all(after < before for before, after in pairwise(values))


def _rises(values: Sequence[float]) -> bool:
    return all(after > before for before, after in pairwise(values))


def _of(measured: Lines, rule: str) -> Lines:
    """The lines of one rule, from the fewest workers to the most."""
    return _by_workers([each for each in measured if each.experiment.rule == rule])


def _by_workers(measured: Lines) -> Lines:
    return sorted(measured, key=lambda each: each.workers)


def _with_most_workers(measured: Lines, *rules: str) -> dict[str, Measured] | None:
    """Each rule's line with the most workers that any of them has; None where one has no such line."""
    most = max((each.workers for each in measured if each.experiment.rule in rules), default=0)
    lines = {each.experiment.rule: each for each in measured if each.workers == most}
    return {rule: lines[rule] for rule in rules} if lines.keys() >= set(rules) else None


def _find(measured: Lines, fits: Callable[[Experiment], bool]) -> Measured | None:
    """The line with such settings; None where it was not run."""
    return next((each for each in measured if fits(each.experiment)), None)


def _said(measured: Lines, value: Callable[[Measured], str]) -> str:
    """A value of each line, by its number of workers, which is called that only once."""
    names = [count(each.workers) if place == 0 else str(each.workers) for place, each in enumerate(measured)]
    return "; ".join(f"{name}: {value(each)}" for name, each in zip(names, measured, strict=True))


def _loss(each: Measured) -> str:
    return each.loss.text() + _failures(each)


def _failures(each: Measured) -> str:
    """The number of failed runs, as text to append; empty if none failed."""
    return f", {each.failed} of {len(each.results)} runs failed" if each.failed else ""


def _percent(each: Measured) -> str:
    return f"{each.accuracy.text('{:.2f}', 100)} %"


def gem_learns(measured: Lines) -> Verdict | None:
    mine = _of(measured, "gem")
    found = Verdict(f"final loss with {_said(mine, _loss)}", _yes(not any(each.failed for each in mine)))
    return found if mine else None


def downpour_degrades(measured: Lines) -> Verdict | None:
    mine, most = _of(measured, "downpour"), _with_most_workers(measured, "downpour", "gem")
    if len(mine) < 2 or most is None:
        return None
    worse = mine[-1].worst > _SAME * max(mine[0].worst, most["gem"].worst)
    return Verdict(f"final loss with {_said(mine, _loss)}, test accuracy {_percent(mine[-1])}", _yes(worse))


def adaptive_between(measured: Lines) -> Verdict | None:
    """Judges every number of workers, of which the largest has to be there."""
    rules = ("gem", "adaptive", "downpour")
    if _with_most_workers(measured, *rules) is None:
        return None
    of = {(each.workers, each.experiment.rule): each for each in measured}
    complete = [gem for gem in _of(measured, "gem") if all((gem.workers, rule) in of for rule in rules)]
    between = [_rises([of[gem.workers, rule].worst for rule in rules]) for gem in complete]
    agrees = Agreement.YES if all(between) else Agreement.PARTLY if any(between) else Agreement.NO
    losses = _said(complete, lambda gem: ", ".join(f"{of[gem.workers, rule].loss.mean:.3f}" for rule in rules))
    return Verdict(f"final loss under {', '.join(rules)} with {losses}", agrees)


def hundred_workers(measured: Lines) -> Verdict | None:
    if not measured:
        return None
    (each,) = measured
    run = each.experiment
    text = f"{_percent(each)} with {run.workers} workers, {run.steps} steps each{_failures(each)}"
    if (run.task, run.workers, run.steps) != ("mnist", PAPERS_WORKERS, PAPERS_STEPS):
        return Verdict(text, Agreement.UNKNOWN)
    return Verdict(text, _yes(not each.failed and each.accuracy.mean >= PAPERS_ACCURACY - _ACCURACY_MARGIN))


def pi_falls_with_workers(measured: Lines) -> Verdict | None:
    ordered = _by_workers(measured)
    text = f"mean of the median π with {_said(ordered, lambda each: each.pi.text())}"
    return Verdict(text, _yes(_falls([each.pi.mean for each in ordered]))) if len(measured) > 1 else None


def pi_as_the_papers(measured: Lines) -> Verdict | None:
    workers, papers = _PAPERS_PI
    mine = _find(measured, lambda run: run.workers == workers)
    if mine is None:
        return None
    return Verdict(_said([mine], lambda each: each.pi.text()), _yes(papers / _FACTOR <= mine.pi.mean <= papers * _FACTOR))


def same_data(measured: Lines) -> Verdict | None:
    alone = _find(measured, lambda run: run.workers == 1)
    if alone is None or len(measured) < 2:
        return None
    close = max(each.worst for each in measured) <= _CLOSE * alone.worst < math.inf
    return Verdict(f"final loss with {_said(measured, _loss)}", _yes(close))


def less_time(measured: Lines) -> Verdict | None:
    ordered = _by_workers(measured)
    times = [stats.spread(stats.seconds_to(run, TARGET_LOSS, TARGET_WINDOW) for run in each.results) for each in ordered]
    said = [f"{time.text('{:.1f}')} s" if time.count else "never" for time in times]
    text = f"simulated time to a loss of {TARGET_LOSS} with {_said(ordered, lambda each: said[ordered.index(each)])}"
    reached = [time.mean if time.count == len(each.results) else math.inf for each, time in zip(ordered, times, strict=True)]
    return Verdict(text, _yes(_falls(reached))) if len(measured) > 1 else None


def against_sequential(end: Callable[[Result], float], course: Callable[[Sequence[Result]], stats.Band]) -> Judge:
    """Judges a loss under GEM against the sequential baseline's: at the end, and over data epochs."""

    def judge(measured: Lines) -> Verdict | None:
        gem, base = _find(measured, lambda run: run.rule == "gem"), _find(measured, lambda run: run.rule == "momentum")
        if gem is None or base is None:
            return None
        ours, theirs = (stats.spread(end(result) for result in each.results) for each in (gem, base))
        mine = _said([gem], lambda each: ours.text() + _failures(each))
        text = f"at the end, GEM with {mine}; sequential: {theirs.text()}{_failures(base)}"
        if gem.failed or not ours.mean <= _SAME * theirs.mean:
            return Verdict(text, Agreement.NO)
        higher = _higher(course(gem.results), course(base.results))
        if len(higher):
            return Verdict(f"{text}; higher until epoch {higher[-1]:.1f}", Agreement.PARTLY)
        return Verdict(text, Agreement.YES)

    return judge


def _higher(ours: stats.Band, theirs: stats.Band) -> Array:
    """The places at which our mean is higher than theirs."""
    higher: Array = ours.x[ours.mean > _SAME * np.interp(ours.x, theirs.x, theirs.mean)]
    return higher


def overfits(rule: str, expected: bool) -> Judge:
    """Judges whether the validation loss under a rule ends clearly above its lowest, while the training loss falls."""

    def judge(measured: Lines) -> Verdict | None:
        mine = _find(measured, lambda run: run.rule == rule)
        if mine is None:
            return None
        rises, places = zip(*map(stats.validation_rise, mine.results), strict=True)
        epochs = [place * stats.data_epochs(result)[-1] for place, result in zip(places, mine.results, strict=True)]
        trained = stats.spread(map(stats.training_rise, mine.results, places))
        text = (
            f"validation loss at the end, divided by its lowest: {stats.spread(rises).text('{:.2f}')}; lowest in epoch "
            f"{stats.spread(epochs).text('{:.0f}')} of {stats.data_epochs(mine.results[0])[-1]:.0f}; training loss since then: "
            f"times {trained.text('{:.2f}')}"
        )
        rose = stats.spread(rises).mean > _SAME
        unstable = rose and expected and trained.mean > 1  # then it is no overfitting
        return Verdict(text, Agreement.PARTLY if unstable else _yes(rose == expected))

    return judge


def momentum_converges(measured: Lines) -> Verdict | None:
    """Yes if its loss is close to GEM's; partly if it is higher, but did not fail."""
    alone, gem = _find(measured, lambda run: run.rule == "momentum"), _find(measured, lambda run: run.rule == "gem")
    if alone is None or gem is None:
        return None
    close = alone.loss.mean <= _CLOSE * gem.loss.mean
    agrees = Agreement.NO if alone.failed else Agreement.YES if close else Agreement.PARTLY
    return Verdict(f"final loss of one process: {_loss(alone)}", agrees)


def _validation_loss(result: Result) -> float:
    return math.nan if result.test_loss is None else result.test_loss


def downpour_fails(measured: Lines) -> Verdict | None:
    most = _with_most_workers(measured, "downpour", "gem")
    if most is None:
        return None
    other, runs = most["downpour"], len(most["downpour"].results)
    agrees = Agreement.YES if other.failed > runs / 2 else Agreement.PARTLY if other.failed else Agreement.NO
    text = f"{_percent(other)}, {other.failed} of {runs} failed; GEM {_percent(most['gem'])}"
    return Verdict(_said([other], lambda each: text), agrees)


def _by_kappa(measured: Lines) -> dict[int, Lines]:
    """For each number of workers with more than one line, from the smallest κ to the largest."""
    found: dict[int, Lines] = {}
    for each in sorted(measured, key=lambda each: (each.workers, each.experiment.kappa)):
        found.setdefault(each.workers, []).append(each)
    return {n: lines for n, lines in found.items() if len(lines) > 1}


def kappa_helps(measured: Lines) -> Verdict | None:
    """For each number of workers, the κ with the lowest loss lies between 1 and the one that the paper calls suboptimal."""
    best = {n: min(mine, key=lambda each: each.worst).experiment.kappa for n, mine in _by_kappa(measured).items()}
    if not best or not any(_KAPPA < each.experiment.kappa < _LARGER_KAPPA for each in measured):
        return None
    words = "; ".join(f"{count(n)}: lowest with κ = {kappa:g}" for n, kappa in best.items())
    return Verdict(words, _for_all(_KAPPA < kappa < _LARGER_KAPPA for kappa in best.values()))


def larger_kappa_is_worse(measured: Lines) -> Verdict | None:
    groups = _by_kappa(measured)
    if not groups or any(mine[-1].experiment.kappa != _LARGER_KAPPA for mine in groups.values()):
        return None
    worse = [larger.worst > _SAME * min(each.worst for each in others) for *others, larger in groups.values()]
    losses = {n: ", ".join(f"κ = {each.experiment.kappa:g}: {_loss(each)}" for each in mine) for n, mine in groups.items()}
    return Verdict("; ".join(f"{count(n)}: {each}" for n, each in losses.items()), _for_all(worse))


def larger_kappa_larger_pi(measured: Lines) -> Verdict | None:
    groups = _by_kappa(measured)
    rises = [_rises([each.pi.mean for each in mine]) for mine in groups.values()]
    words = [f"{count(n)}: {', '.join(each.pi.text() for each in mine)}" for n, mine in groups.items()]
    return Verdict("; ".join(words), _for_all(rises)) if groups else None


def tensors_differ(measured: Lines) -> Verdict | None:
    means = {each.label: mean for each in measured if (mean := _tensor_means(each))}
    if not means:
        return None
    words = []
    for label, mean in means.items():
        low, high = min(mean, key=lambda name: mean[name]), max(mean, key=lambda name: mean[name])
        words.append(f"{label}: from {mean[low]:.3f} ({low}) to {mean[high]:.3f} ({high})")
    return Verdict("; ".join(words), _yes(all(max(mean.values()) > 1.2 * min(mean.values()) for mean in means.values())))


def _tensor_means(each: Measured) -> dict[str, float]:
    names = [name for name in each.results[0].tensors if name != "version"]
    return {name: float(np.nanmean(np.concatenate([run.tensors[name] for run in each.results]))) for name in names}


def costs_at_most(drop: float, changed: Callable[[Experiment], bool]) -> Judge:
    """Judges whether GEM's accuracy with a changed setting is at most so far below that with the usual ones."""

    def judge(measured: Lines) -> Verdict | None:
        mine = _of(measured, "gem")
        usual, other = _find(mine, _usual), _find(mine, changed)
        if usual is None or other is None:
            return None
        text = "; ".join(f"{each.label}: {_percent(each)}{_failures(each)}" for each in mine)
        return Verdict(text, _yes(other.accuracy.mean >= usual.accuracy.mean - drop and not other.failed))

    return judge


def more_workers_learn_more(measured: Lines) -> Verdict | None:
    """Of GEM's workers whose times vary: in as many steps, more of them get further."""
    mine = [each for each in _of(measured, "gem") if each.experiment.spread == AT_RANDOM]
    rises = _rises([each.accuracy.mean for each in mine]) and not any(each.failed for each in mine)
    return Verdict(_said(mine, _percent), _yes(rises)) if len(mine) > 1 else None


def _usual(run: Experiment) -> bool:
    """Workers of equal speed that stay, and GEM's own proxy."""
    return (run.slowdown, run.replacements, run.rule_options) == (1.0, 0, "")


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
        against_sequential(stats.final, stats.training),
    ),
    Claim("5", "… and so is its validation loss", against_sequential(_validation_loss, stats.validation)),
    Claim("5", "Momentum SGD starts to overfit …", overfits("momentum", True)),
    Claim("5", "… and GEM does not", overfits("gem", False)),
    Claim("6", "At η = 0.1 GEM adapts …", gem_learns),
    Claim("6", "… as momentum SGD does, which it is to follow …", momentum_converges),
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
