"""Beyond the paper: snapshot conventions, stragglers, churn, other proxies, and from one worker to a thousand."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from benchmarks.paper.plan import AT_RANDOM, STRAGGLER_SLOWDOWN, Scale
from benchmarks.paper.statistics import Band, Measured, Spread, accuracy, band, final_loss, worker_steps
from benchmarks.paper.style import (
    OTHERS,
    RULE_COLOURS,
    RULE_NAMES,
    Drawing,
    legend,
    loss_axes,
    palette,
    panels,
    pi_axes,
)


def conventions(measured: list[Measured], scale: Scale) -> Drawing:
    """Loss and π under the three snapshot conventions."""
    return _loss_and_pi(measured, f"Snapshot conventions, {measured[0].experiment.workers} workers under GEM")


def straggler(measured: list[Measured], scale: Scale) -> Drawing:
    """A panel for each rule: all workers alike (dashed), and one of them ten times slower."""
    rules = list(dict.fromkeys(each.experiment.rule for each in measured))
    n, seconds = measured[0].experiment.workers, measured[0].experiment.step_seconds
    title = (
        f"One of {n} workers takes {STRAGGLER_SLOWDOWN:g} times as long; compute time is simulated: {seconds:g} s a gradient"
    )
    drawing, axes = panels(1, len(rules), title)
    for place, rule in zip(axes, rules, strict=True):
        for each in (each for each in measured if each.experiment.rule == rule):
            style = "-" if each.experiment.slowdown > 1 else "--"
            drawing.line(place, rule, _with_accuracy(each), _loss(each), RULE_COLOURS[rule], style)
        loss_axes(place, RULE_NAMES[rule], "commits / workers")
    return drawing


def churn(measured: list[Measured], scale: Scale) -> Drawing:
    """Loss and staleness of a cluster whose workers stay, and of one whose workers come and go."""
    n = measured[0].experiment.workers
    times = max(each.experiment.replacements for each in measured)
    title = f"{n} workers under GEM; a fifth of them is replaced {times} times, every other time by a kill"
    drawing, (left, right) = panels(1, 2, title, 5)
    for each, style in zip(measured, ("--", "-"), strict=False):
        drawing.line(left, "loss", _with_accuracy(each), _loss(each), RULE_COLOURS["gem"], style)
        curve = band(each.results, worker_steps, "staleness")
        drawing.line(right, "staleness", each.label, curve, RULE_COLOURS["gem"], style)
    loss_axes(left, "training loss, and test accuracy", "commits / workers")
    right.set(title="staleness", xlabel="commits / workers", ylabel="τ, commits")
    right.set_ylim(bottom=0)
    legend(right)
    return drawing


def proxies(measured: list[Measured], scale: Scale) -> Drawing:
    """The loss under GEM's own proxy and under others."""
    return _loss_and_pi(measured, f"What GEM compares a commit with: proxies, {measured[0].experiment.workers} workers")


def _loss_and_pi(measured: list[Measured], title: str) -> Drawing:
    """Variants of GEM, a colour for each: the loss, and the median π."""
    drawing, (left, right) = panels(1, 2, title, 5.4, 4)
    for each, colour in zip(measured, palette(len(measured)), strict=True):
        drawing.line(left, "loss", _with_accuracy(each), _loss(each), colour)
        drawing.line(right, "pi", each.label, band(each.results, worker_steps, "pi_median"), colour)
    loss_axes(left, "training loss, and test accuracy")
    pi_axes(right, "median π of a commit (0: most parameters stay)")
    return drawing


def _loss(each: Measured) -> Band:
    return band(each.results, worker_steps, "loss")


def _with_accuracy(each: Measured) -> str:
    return f"{each.label}: {accuracy(each.results).text('{:.2f}', 100)} %"


def errors(measured: list[Measured], scale: Scale) -> Drawing:
    """Test error by the number of workers; a rule that was tried at several rates has its best, by its training loss."""
    drawing, (axes,) = panels(1, 1, f"{scale.beyond_steps} gradients of each worker", 7.5, 4.6)
    labels = list(dict.fromkeys(each.label for each in measured))
    others = cycle(OTHERS)
    for label in labels:
        tried = [each for each in measured if each.label == label]
        lines = best_by_workers(tried)
        first = lines[0].experiment
        colour = RULE_COLOURS.get(first.rule) or next(others)
        style = "o-" if first.spread == AT_RANDOM else "o--" if first.batch_variation else "o:"
        counts = [float(each.experiment.workers) for each in lines]
        rates = len(tried) // len(lines)
        name = f"{label}, best of {rates} rates" if rates > 1 else label
        drawing.points(axes, "test error", name, counts, [_error(each) for each in lines], colour, 100, style)
    axes.set(xlabel="workers", ylabel="test error, % (log scale)", xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.axhline(90, color="#888888", linewidth=0.8, linestyle=":")
    legend(axes)
    return drawing


def best_by_workers(measured: list[Measured]) -> list[Measured]:
    """For each number of workers, in order, the one with the lowest training loss at the end: test data have no say."""
    counts = sorted({each.experiment.workers for each in measured})
    return [min((each for each in measured if each.experiment.workers == n), key=_final) for n in counts]


def _error(each: Measured) -> Spread:
    right = accuracy(each.results)
    return replace(right, mean=1 - right.mean, low=1 - right.high, high=1 - right.low)


def _final(each: Measured) -> float:
    found = final_loss(each.results)
    return found.mean if found.count == len(each.results) else float("inf")
