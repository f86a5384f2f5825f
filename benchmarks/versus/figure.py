"""The figure: time to the lower loss by kind of cluster, a panel for each model and number of workers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.lib.style import BLUE, GREY, ORANGE, TEAL, VIOLET, legend, panels, save, styled
from benchmarks.versus.analysis import Cell, cell, fast_alone, tuned
from benchmarks.versus.contenders import contenders
from benchmarks.versus.models import GOALS
from benchmarks.versus.plan import WIDTHS, Case, Results
from benchmarks.versus.profiles import PROFILES

NAME = "versus.png"
COLOURS = {"ddp": GREY, "local-sgd": ORANGE, "diloco": VIOLET, "torchft": TEAL, "gem": BLUE}
_PALE = 0.3  # opacity
_MARKS = (
    Line2D([], [], color="black", marker="|", linestyle="", label="a seed that reached it"),
    Line2D([], [], color="black", marker="D", markersize=4, linestyle="", label="the fast half of the workers alone"),
)
_WHOLE = 0.8  # of the distance between two groups, which their bars fill


def draw(folder: Path, results: Results, limit: float) -> bool:
    """Writes the figure; returns whether there was anything to show."""
    drawn = figure(results, limit)
    if drawn is not None:
        save(drawn, folder / NAME)
    return drawn is not None


@styled
def figure(results: Results, limit: float) -> Figure | None:
    """A panel with fewer seeds than others is left out."""
    seeds = {(model, width): _seeds(model, width, results) for model in GOALS for width in sorted(WIDTHS)}
    most = max(seeds.values())
    if not most:
        return None
    shown = [each for each, count in seeds.items() if count == most]
    columns = min(2, len(shown))
    bars = [sum(map(len, _cells(*each, results).values())) for each in shown]
    heights = [max(bars[first : first + columns]) for first in range(0, len(bars), columns)]
    title = "Time to the lower held-out loss, each at its best rate (lines: lowest to highest seed)"
    drawn, places = panels(len(heights), columns, title, 3.7, height_ratios=heights)
    for axes, each in zip(places, shown, strict=False):
        _panel(axes, *each, results, limit)
    for axes in places[len(shown) :]:
        axes.set_axis_off()
    names = [name for name in contenders() if any(name in _cells(*each, results) for each in shown)]
    patches = [Patch(color=COLOURS[name], label=contenders()[name].label) for name in names]
    legend(drawn, *patches, Patch(color=GREY, alpha=_PALE, label="pale: not reached under every seed"), *_MARKS, columns=3)
    return drawn


def _cells(model: str, width: int, results: Results) -> dict[str, dict[str, Cell]]:
    """By contender and profile, what is measured."""
    found = {}
    for name in contenders():
        case = Case(name, model, width)
        cells = {profile: each for profile in PROFILES if (each := cell(case, profile, tuned(case, results), results))}
        if cells:
            found[name] = cells
    return found


def _seeds(model: str, width: int, results: Results) -> int:
    """The most seeds that any of its bars has."""
    return max((len(each.outcomes) for cells in _cells(model, width, results).values() for each in cells.values()), default=0)


def _panel(axes: Axes, model: str, width: int, results: Results, limit: float) -> None:
    """A group of bars for each profile."""
    cells = _cells(model, width, results)
    profiles = [profile for profile in PROFILES if any(profile in each for each in cells.values())]
    for place, profile in enumerate(profiles):
        measured = {name: of[profile] for name, of in cells.items() if profile in of}
        thick = _WHOLE / len(measured)
        for number, (name, each) in enumerate(measured.items()):
            y = place + (number - (len(measured) - 1) / 2) * thick
            _bar(axes, y, thick, each, COLOURS[name], limit)
            alone = fast_alone(Case(name, model, width), profile, results) if profile == "mixed" else None
            if alone is not None and (mean := alone.mean(1)) is not None:
                axes.plot(mean, y, "D", color="black", markersize=4)
    axes.set_yticks(range(len(profiles)), profiles)
    axes.set(title=f"{model}, {width} workers: loss {GOALS[model].losses[1]:g}", xlabel="time in units of a gradient")
    axes.set_xlim(0, 1.15 * limit)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _bar(axes: Axes, y: float, thick: float, of: Cell, colour: str, limit: float) -> None:
    """A pale bar ends at the limit: not every seed has reached the loss by then. Those that have are marked."""
    mean, times = of.mean(1), of.times(1)
    axes.barh(y, limit if mean is None else mean, thick * 0.9, color=colour, alpha=_PALE if mean is None else 1.0)
    if mean is not None:
        axes.errorbar(mean, y, xerr=[[mean - min(times)], [max(times) - mean]], color="black", capsize=2, linewidth=1)
    else:
        axes.plot(times, [y] * len(times), "|", color="black", markersize=7)
    text, end = (
        (f" {len(times)} of {len(of.outcomes)}" if times else f" > {limit:g}", limit)
        if mean is None
        else (f" {mean:.0f}", max(times))
    )
    axes.text(end, y, text, ha="left", va="center_baseline", fontsize=8)
