"""The figure: time to the lower loss by kind of cluster, a panel for each model and number of workers."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.paper.style import panels
from benchmarks.versus.analysis import Cell, cell, tuned
from benchmarks.versus.contenders import contenders
from benchmarks.versus.models import GOALS
from benchmarks.versus.plan import WIDTHS, Case, Results
from benchmarks.versus.profiles import PROFILES

NAME = "versus.png"
_COLOURS = ("#888888", "#bcbd22", "#9467bd", "#1f77b4", "#17becf", "#2ca02c")
_WHOLE = 0.84  # of the distance between two groups, which their bars fill


def draw(folder: Path, results: Results, limit: float) -> bool:
    """Writes the figure; returns whether there was anything to show. A panel with fewer seeds than others is left out."""
    seeds = {(model, width): _seeds(model, width, results) for model in GOALS for width in sorted(WIDTHS)}
    most = max(seeds.values())
    if not most:
        return False
    shown = [each for each, count in seeds.items() if count == most]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    title = "Time to the lower held-out loss, each at its best rate"
    drawing, places = panels(rows, columns, title, 5.6 if columns == 2 else 9.0, 3.4)
    for number, axes in enumerate(places):
        if number < len(shown):
            _panel(axes, *shown[number], results, limit)
        else:
            axes.set_axis_off()
    names = [name for name in contenders() if any(name in _cells(*each, results) for each in shown)]
    patches = [Patch(color=_colour(name), label=contenders()[name].label) for name in names]
    drawing.figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    drawing.figure.savefig(folder / NAME, dpi=110)
    plt.close(drawing.figure)
    return True


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
    """A group of bars for each profile. A bar that ends in ▲ did not reach the loss under every seed."""
    cells = _cells(model, width, results)
    profiles = [profile for profile in PROFILES if any(profile in each for each in cells.values())]
    thick = _WHOLE / len(cells)
    for number, (name, of) in enumerate(cells.items()):
        for place, profile in enumerate(profiles):
            if profile in of:
                x = place + (number - (len(cells) - 1) / 2) * thick
                _bar(axes, x, thick, of[profile], _colour(name), limit)
    axes.set_xticks(range(len(profiles)), profiles, rotation=20)
    axes.set(title=f"{model}, {width} workers: loss {GOALS[model].losses[1]:g}", ylabel="time in units of a gradient")
    axes.grid(axis="x", visible=False)


def _colour(name: str) -> str:
    return _COLOURS[list(contenders()).index(name) % len(_COLOURS)]


def _bar(axes: Axes, x: float, thick: float, of: Cell, colour: str, limit: float) -> None:
    mean, times = of.mean(1), of.times(1)
    height = limit if mean is None else mean
    axes.bar(x, height, thick * 0.92, color=colour, alpha=0.35 if mean is None else 1.0)
    if mean is None:
        axes.text(x, height, "▲", ha="center", va="bottom", fontsize=8, color=colour)  # beyond the limit
        return
    axes.errorbar(x, mean, [[mean - min(times)], [max(times) - mean]], color="black", capsize=2, linewidth=1)
    axes.text(x, max(times), f"{mean:.0f}", ha="center", va="bottom", fontsize=7)
