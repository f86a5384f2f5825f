"""What the figures show, computed from the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.lib.page import count
from benchmarks.lib.results import plain, write
from benchmarks.paper import statistics as stats
from benchmarks.paper.plan import BASIC_RULES, EFFECTIVE_BATCH
from benchmarks.paper.results import Array

RULE_NAMES = {"gem": "GEM", "adaptive": "adaptive staleness", "downpour": "DOWNPOUR", "momentum": "momentum SGD, one process"}
TARGET_LOSS = 0.5  # Fig. 4: what the runs are timed to
TARGET_WINDOW = 10 * EFFECTIVE_BATCH  # samples that the loss is the mean of

Columns: TypeAlias = dict[str, Any]
Lines: TypeAlias = dict[str, Columns]


@dataclass(frozen=True)
class Content:
    """A figure without its looks, as it is stored.

    Attributes:
        title: Of the figure.
        panels: By name of the panel and name of the line: the columns x, mean, low and high (None for NaN), and maybe a note.
    """

    title: str
    panels: dict[str, Lines]

    def save(self, path: Path) -> None:
        write(path, json.dumps(asdict(self), allow_nan=False, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Content:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def loss(measured: list[stats.Measured]) -> Content:
    """Fig. 1: the training loss over worker steps, a panel for each number of workers; final loss and accuracy."""
    finals: dict[str, Lines] = {"final training loss": {}, "test accuracy": {}}
    for rule in BASIC_RULES:
        mine = [each for each in measured if each.experiment.rule == rule]
        x = [each.workers for each in mine]
        finals["final training loss"][RULE_NAMES[rule]] = _points(x, [each.loss for each in mine])
        finals["test accuracy"][RULE_NAMES[rule]] = _points(x, [each.accuracy for each in mine], 100)
    return Content("Fig. 1: three rules, more and more workers", _rules_by_workers(measured) | finals)


def misspecified(measured: list[stats.Measured]) -> Content:
    """Fig. 6: the three rules at twice the learning rate, and what GEM is to follow."""
    return Content("Fig. 6: a learning rate that is too large, η = 0.1", _rules_by_workers(measured))


def many(measured: list[stats.Measured]) -> Content:
    """Fig. 2: training loss and test accuracy of the largest number of workers."""
    (each,) = measured
    n = each.workers
    curves = [(run.evaluations["version"] / n, 100 * run.evaluations["accuracy"]) for run in each.results]
    scores = _line(stats.over_seeds(curves), _accuracy(each))
    panels = {"loss": {count(n): _curve(each, "loss")}, "test accuracy": {count(n): scores}}
    return Content(f"Fig. 2: {n} workers under GEM, {each.experiment.steps} steps each", panels)


def pi(measured: list[stats.Measured]) -> Content:
    """Fig. 3: the median π over worker steps, a line for each number of workers."""
    lines = {each.label: _curve(each, "pi_median") for each in measured}
    return Content("Fig. 3: the scaling factor π under GEM", {"pi": lines})


def split_batch(measured: list[stats.Measured]) -> Content:
    """Fig. 4: a batch of fixed size split over n workers, with simulated compute time."""
    workers = [each.workers for each in measured]
    times = [stats.spread(stats.seconds_to(result, TARGET_LOSS, TARGET_WINDOW) for result in each.results) for each in measured]
    panels = {
        "loss over samples": {each.label: _curve(each, "loss", stats.samples) for each in measured},
        "loss over time": {each.label: _curve(each, "loss", stats.run_seconds) for each in measured},
        "time to a loss": {"measured": _points(workers, times)},
    }
    seconds = measured[0].experiment.step_seconds * workers[0]
    title = f"Fig. 4: batches of {EFFECTIVE_BATCH} split over n workers under GEM; a batch takes one worker {seconds:g} s"
    return Content(title, panels)


def against_sequential(measured: list[stats.Measured]) -> Content:
    """Fig. 5: training and validation loss over data epochs."""
    training, validation = (
        {each.label: _line(course(each.results)) for each in measured} for course in (stats.training, stats.validation)
    )
    title = "Fig. 5: GEM and sequential momentum SGD on the same amount of data"
    return Content(title, {"training": training, "validation": validation})


def kappas(measured: list[stats.Measured]) -> Content:
    """Fig. 8: GEM with its proxy amplified by κ: the final loss, and the median π."""
    panels: dict[str, Lines] = {"final training loss": {}, "median π": {}}
    for n in sorted({each.workers for each in measured}):
        mine = [each for each in measured if each.workers == n]
        kappa = [each.experiment.kappa for each in mine]
        panels["final training loss"][count(n)] = _points(kappa, [each.loss for each in mine])
        panels["median π"][count(n)] = _points(kappa, [each.pi for each in mine])
    return Content("Fig. 8: the proxy amplified by κ", panels)


def medians(measured: list[stats.Measured]) -> Content:
    """Figs. 9 and 10: a panel for each tensor, biases last; a line for each number of workers."""
    names = [name for name in measured[0].results[0].tensors if name != "version"]
    names.sort(key=lambda name: name.endswith("bias"))
    panels = {name: {each.label: _line(_median(each, name)) for each in measured} for name in names}
    return Content("Figs. 9 and 10: median π of each tensor under GEM, sampled twice a second", panels)


def conventions(measured: list[stats.Measured]) -> Content:
    """Loss and π under the three snapshot conventions."""
    return Content(f"Snapshot conventions, {measured[0].experiment.workers} workers under GEM", _loss_and_pi(measured))


def proxies(measured: list[stats.Measured]) -> Content:
    """The loss under GEM's own proxy and under others."""
    n = measured[0].experiment.workers
    return Content(f"What GEM compares a commit with: five proxies, {n} workers", _loss_and_pi(measured))


def straggler(measured: list[stats.Measured]) -> Content:
    """A panel for each rule: all workers alike, and one of them ten times slower."""
    n, seconds = measured[0].experiment.workers, measured[0].experiment.step_seconds
    panels: dict[str, Lines] = {}
    for each in measured:
        slower = each.experiment.slowdown
        label = f"one worker takes {slower:g} times as long" if slower > 1 else "all workers alike"
        panels.setdefault(RULE_NAMES[each.experiment.rule], {})[label] = _curve(each, "loss", note=_accuracy(each))
    return Content(f"A straggler among {n} workers; a gradient takes the others {seconds:g} s (simulated)", panels)


def churn(measured: list[stats.Measured]) -> Content:
    """Loss and staleness of a cluster whose workers stay, and of one whose workers come and go."""
    panels: dict[str, Lines] = {"loss": {}, "staleness": {}}
    for each in measured:
        often = each.experiment.replacements
        label = f"a fifth is replaced {often} times, every other time by a kill" if often else "all workers stay"
        panels["loss"][label] = _curve(each, "loss", note=_accuracy(each))
        panels["staleness"][label] = _curve(each, "staleness")
    return Content(f"{measured[0].experiment.workers} workers under GEM that stay, or come and go", panels)


def errors(measured: list[stats.Measured]) -> Content:
    """Test error by the number of workers; a rule that was tried at several rates has its best, by its training loss."""
    lines: Lines = {}
    for label in dict.fromkeys(each.label for each in measured):
        tried = [each for each in measured if each.label == label]
        best = best_by_workers(tried)
        rule, rates = best[0].experiment.rule, len(tried) // len(best)
        name = label.replace(rule, RULE_NAMES[rule]) + (f", best of {rates} rates" if rates > 1 else "")
        lines[name] = _points([each.workers for each in best], [_error(each) for each in best], 100)
    most = max(each.workers for each in measured)
    return Content(f"From 1 to {most:,} workers, {measured[0].experiment.steps} steps each", {"test error": lines})


def best_by_workers(measured: list[stats.Measured]) -> list[stats.Measured]:
    """For each number of workers, in order, the one with the lowest training loss at the end: test data have no say."""

    def loss(each: stats.Measured) -> float:
        return each.loss.mean if each.loss.count == len(each.results) else float("inf")

    counts = sorted({each.workers for each in measured})
    return [min((each for each in measured if each.workers == n), key=loss) for n in counts]


def _rules_by_workers(measured: list[stats.Measured]) -> dict[str, Lines]:
    """For each number of workers the loss under each rule; a note says how many runs did not learn. The loss of one process, if
    there is one, is in each panel."""
    panels: dict[str, Lines] = {}
    alone = [each for each in measured if each.experiment.setting == "sequential"]
    for each in sorted((each for each in measured if each not in alone), key=lambda each: each.workers):
        bad = each.failed
        note = f"{bad} of {len(each.results)} runs did not learn" if bad else ""
        lines = panels.setdefault(count(each.workers), {})
        lines[RULE_NAMES[each.experiment.rule]] = _curve(each, "loss", note=note)
    for lines in panels.values():
        lines.update({RULE_NAMES[each.experiment.rule]: _curve(each, "loss") for each in alone})
    return panels


def _loss_and_pi(measured: list[stats.Measured]) -> dict[str, Lines]:
    """Variants of GEM: the loss, noted with the test accuracy, and the median π."""
    return {
        "loss": {each.label: _curve(each, "loss", note=_accuracy(each)) for each in measured},
        "pi": {each.label: _curve(each, "pi_median") for each in measured},
    }


def _curve(each: stats.Measured, column: str, x: stats.Axis = stats.worker_steps, note: str = "") -> Columns:
    return _line(stats.band(each.results, x, column), note)


def _line(curve: stats.Band, note: str = "") -> Columns:
    return {name: _plain(getattr(curve, name)) for name in ("x", "mean", "low", "high")} | ({"note": note} if note else {})


def _points(x: Sequence[float], values: list[stats.Spread], scale: float = 1.0) -> Columns:
    return {name: _plain(column) for name, column in stats.columns(x, values, scale).items()}


def _plain(values: Array) -> list[float | None]:
    return [plain(value, 5) for value in values.tolist()]


def _accuracy(each: stats.Measured) -> str:
    return f"{each.accuracy.text('{:.2f}', 100)} %"


def _median(each: stats.Measured, tensor: str) -> stats.Band:
    """The smoothed median π of one tensor over worker steps."""
    return stats.over_seeds([
        (run.tensors["version"] / run.experiment.workers, stats.smooth(run.tensors[tensor], 0.1))
        for run in each.results
        if tensor in run.tensors
    ])  # fmt: skip


def _error(each: stats.Measured) -> stats.Spread:
    right = each.accuracy
    return stats.Spread(1 - right.mean, 1 - right.high, 1 - right.low, right.count)


CONTENT: dict[str, Callable[[list[stats.Measured]], Content]] = {
    "1": loss, "2": many, "3": pi, "4": split_batch, "5": against_sequential, "6": misspecified, "8": kappas, "9-10": medians,
    "conventions": conventions, "straggler": straggler, "churn": churn, "proxies": proxies, "beyond": errors,
}  # fmt: skip
