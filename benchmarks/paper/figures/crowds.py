"""From one worker to a thousand."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from benchmarks.paper.plan import AT_RANDOM, Scale
from benchmarks.paper.statistics import Measured, Spread, accuracy, final_loss
from benchmarks.paper.style import OTHERS, RULE_COLOURS, Drawing, legend, panels

_CHANCE = 90.0  # per cent


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
    axes.axhline(_CHANCE, color="#888888", linewidth=0.8, linestyle=":")
    legend(axes)
    return drawing


def best_by_workers(measured: list[Measured]) -> list[Measured]:
    """For each number of workers, in order, the one with the lowest training loss at the end: test data have no say."""
    counts = sorted({each.experiment.workers for each in measured})
    return [min((each for each in measured if each.experiment.workers == n), key=_loss) for n in counts]


def _error(each: Measured) -> Spread:
    right = accuracy(each.results)
    return replace(right, mean=1 - right.mean, low=1 - right.high, high=1 - right.low)


def _loss(each: Measured) -> float:
    found = final_loss(each.results)
    return found.mean if found.count == len(each.results) else float("inf")
