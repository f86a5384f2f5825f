"""The plots: loss over the learning rate, and loss by the number of workers."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.page import count
from benchmarks.lib.style import BAND, BLUE, GREY, RED, dots, legend, marks, panels, save, shades, styled
from benchmarks.models.analysis import Summary, by_rate, measured
from benchmarks.models.plan import SHARED, STEPS, Results, best, case
from benchmarks.models.runs import METHODS
from benchmarks.paper.statistics import columns

_WIDTHS = sorted(STEPS)
_ABOVE_BEST = 1.2  # nats shown above the best loss; what lies beyond is marked at the top
_MATCHED, _UNMATCHED, _ALONE = ("energy matching", BLUE, "o"), ("no energy matching", RED, "D"), ("one worker alone", GREY, "s")


def draw(folder: Path, results: Results) -> list[str]:
    """Writes each plot that has something to show; returns their names."""
    drawings = {"rates": rates(results), "workers": workers(results)}
    for name, figure in drawings.items():
        if figure is not None:
            save(figure, folder / f"{name}.png")
    return [name for name, figure in drawings.items() if figure is not None]


@styled
def rates(results: Results) -> Figure | None:
    """A panel for each method; a line for each number of workers, with its chosen rate in a circle."""
    found = {(name, n): dict(by_rate(case(name, n), results)) for name in METHODS for n in _WIDTHS}
    losses = [each.loss.low for points in found.values() for each in points.values() if each.loss.count]
    if not losses:
        return None
    title = "Held-out loss over the learning rate (○: the chosen rate, ▲: above the panel, or diverged)"
    figure, places = panels(-(-len(METHODS) // 4), 4, title, 3.0, sharey=True)
    low, top = min(losses) - 0.05, min(losses) + _ABOVE_BEST
    for axes, (name, method) in zip(places, METHODS.items(), strict=False):
        for number, (n, colour) in enumerate(zip(_WIDTHS, shades(len(_WIDTHS)), strict=True)):
            chosen = best(case(name, n), results)
            label, shift = f"{count(n)}, {STEPS[n]} steps each", 1.08 ** (number - 1.5)
            _rates_line(axes, label, found[name, n], chosen.rate if chosen else None, colour, top, shift)
        axes.set(title=fill(method.label, 24), xlabel="learning rate (log scale)", xscale="log", ylim=(low, top))
    for axes in places[::4]:
        axes.set_ylabel("held-out loss (nats a character)")
    legend(figure, BAND)
    return figure


def _rates_line(
    axes: Axes, label: str, points: dict[float, Summary], chosen: float | None, colour: str, top: float, shift: float
) -> None:  # fmt: skip
    """One number of workers; what is above the top is marked there, moved aside by a factor."""
    shown = {rate: each.loss for rate, each in points.items() if each.loss.count}
    if shown:
        marks(axes, columns(list(shown), list(shown.values())), colour, label)
    if chosen is not None:
        axes.plot(chosen, points[chosen].loss.mean, "o", color=colour, markersize=11, fillstyle="none")
    beyond = [rate * shift for rate, each in points.items() if not each.loss.count or each.loss.mean > top]
    axes.plot(beyond, [top - 0.03] * len(beyond), "^", color=colour)


@styled
def workers(results: Results) -> Figure | None:
    """A panel for each number of workers: the loss of each method at its best rate, and that of AdamW alone."""
    found = {n: [measured(case(name, n), results).summary.loss for name in METHODS] for n in _WIDTHS}
    if not any(loss.count for losses in found.values() for loss in losses):
        return None
    alone = {n: [measured(case(SHARED, 1, steps), results).summary.loss for steps in (n * STEPS[n], STEPS[n])] for n in _WIDTHS}
    title = "Held-out loss (nats a character) at each method's best learning rate"
    figure, places = panels(1, len(_WIDTHS), title, 3.6, sharex=True, sharey=True)
    lowest = min(loss.low for losses in found.values() for loss in losses if loss.count)
    limits = [loss.high for pair in alone.values() for loss in pair if loss.count]
    # A method that is worse than one worker alone must not squeeze the others.
    places[0].set_xlim(lowest - 0.05, max(limits, default=lowest + _ABOVE_BEST) + 0.05)
    rows = [*(method.label for method in METHODS.values()), "AdamW alone, as many samples", "AdamW alone, as many steps"]
    kinds = [_MATCHED if method.rule == "gem" else _UNMATCHED for method in METHODS.values()]
    for axes, n in zip(places, _WIDTHS, strict=True):
        for height, (loss, kind) in enumerate(zip([*found[n], *alone[n]], [*kinds, _ALONE, _ALONE], strict=True)):
            label, colour, marker = kind
            dots(axes, columns([height], [loss]), colour, label, marker)
        axes.set(title=f"{count(n)},\n{STEPS[n]} steps each", xlabel="held-out loss")
    places[0].set_yticks(range(len(rows)), rows)
    places[0].invert_yaxis()
    legend(figure, BAND, columns=4)
    return figure
