"""How the figures of the documentation look. They can be read at a width of 800 pixels: the smallest text is then 11 high."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

Array: TypeAlias = np.ndarray[Any, Any]
WIDTH = 9.0  # inches
# Colours that people with any colour vision can tell apart, each with a contrast of at least 3:1 on white.
BLUE, RED, ORANGE, TEAL, VIOLET, GREY = COLOURS = ("#1f4e79", "#c0392b", "#d87d00", "#1a9a9a", "#b45bc9", "#444444")
PALE = "#6c93ba"  # for what lies behind a blue line
_STYLE: Any = {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 5,
    "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
RULES = {"GEM": BLUE, "adaptive staleness": ORANGE, "DOWNPOUR": RED}
BAND = Patch(color=GREY, alpha=0.25, linewidth=0, label="band or bar: lowest to highest seed")
MARKERS = "osD^vP"
_DPI = 130

styled = rc_context(_STYLE)  # decorates what draws a figure


def panels(
    rows: int, columns: int, title: str, height: float = 3.0, width: float = WIDTH, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with that many panels of this height, row by row; `shared` is as in `Figure.subplots`."""
    figure = Figure(figsize=(width, height * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def curve(axes: Axes, columns: dict[str, Any], colour: str, label: str) -> None:
    """The mean as a line, and a band from the lowest to the highest seed; `columns`: x, mean, low, high."""
    x, mean, low, high = _arrays(columns)
    axes.plot(x, mean, color=colour, label=label)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def marks(axes: Axes, columns: dict[str, Any], colour: str, label: str, style: str = "o-") -> None:
    """The means as marks, joined by a line, with bars from the lowest to the highest seed."""
    x, mean, low, high = _arrays(columns)
    axes.errorbar(x, mean, _bars(mean, low, high), fmt=style, color=colour, capsize=3, label=label)


def dots(axes: Axes, columns: dict[str, Any], colour: str, label: str, marker: str = "o", hollow: bool = False) -> None:
    """The means as marks at the heights x, with bars from low to high. One beyond the panel is named at its edge."""
    heights, mean, low, high = _arrays(columns)
    left, right = axes.get_xlim()
    inside = (mean >= left) & (mean <= right)
    axes.errorbar(
        mean[inside], heights[inside], xerr=np.compress(inside, _bars(mean, low, high), axis=1), fmt=marker, color=colour,
        markerfacecolor="white" if hollow else colour, capsize=3, label=label,
    )  # fmt: skip
    for height, value in zip(heights[~inside], mean[~inside], strict=True):
        if value > right:
            axes.text(
                right, height, f"{value:.2f} →" if np.isfinite(value) else "diverged →", ha="right", va="center", fontsize=8
            )
        elif value < left:
            axes.text(left, height, f" ← {value:.2f}", ha="left", va="center", fontsize=8)


def log_scale(axes: Axes, of: str = "y", base: float = 10) -> None:
    """Makes an axis logarithmic, with plain numbers. It stays linear if there is nothing to show: all runs may diverge."""
    if np.isfinite(getattr(axes.dataLim, f"minpos{of}")):
        (axes.set_xscale if of == "x" else axes.set_yscale)("log", base=base)
    axis = axes.xaxis if of == "x" else axes.yaxis
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def legend(figure: Figure, *others: Artist, columns: int = 3) -> None:
    """Names each line once, below the panels, in rows of at most `columns`, and no wider than the figure."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        named |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    named |= {str(each.get_label()): each for each in others}
    for fewer in range(columns, 0, -1):
        placed = figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=fewer)
        if fewer == 1 or placed.get_window_extent().width <= figure.bbox.width:
            return
        placed.remove()


def shades(count: int) -> list[str]:
    """Colours for numbers in order, such as numbers of workers; all have enough contrast."""
    return [to_hex(colormaps["inferno"](place)) for place in np.linspace(0.1, 0.66, count)]


def palette(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name."""
    return dict(zip(names, COLOURS, strict=False))


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def _bars(mean: Array, low: Array, high: Array) -> list[Array]:
    return [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]  # a mean of equal values may be rounded past them


def _arrays(columns: dict[str, Sequence[float | None]]) -> list[Array]:
    return [np.array(columns[name], float) for name in ("x", "mean", "low", "high")]
