"""Draws the report's plots as SVG, with Matplotlib. The page gives them their colours, and shows their values on hover."""

from __future__ import annotations

import html
import io
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from gem_api.curves import Column
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from gem_ctl.style import BLUE, GREY, PALE, RED, STYLE

_WIDTH, _HEIGHT = 4.4, 2.3  # inches: on a phone, the text is then as large as the page's small print
_LEFT, _BOTTOM, _RIGHT, _TOP = 0.14, 0.2, 0.97, 0.91  # the axes, as shares of the figure: the same in all plots
_INKS = {"one": BLUE, "two": RED, "quiet": GREY}
_THEME = {**{ink: f"var(--{name})" for name, ink in _INKS.items()}, PALE: "var(--line)"}  # CSS variables of the page
_SVG = {
    "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False, "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY,
    "ytick.color": GREY, "xtick.labelsize": 10, "ytick.labelsize": 10, "axes.labelsize": 10, "grid.color": PALE,
    "grid.alpha": 1, "lines.linewidth": 1.4,
}  # fmt: skip
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_MAX_BARS = 50
_WIDE = 30.0  # from the lowest to the highest loss: on a linear axis, all below the highest would look like 0


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        x: float64, shape (n,), ascending.
        y: float64, shape (n,); may hold NaN and infinities, which are not drawn.
        dashed: Whether to draw it dashed, as a reference line.
        dots: Whether each value is a dot, joined to the next one however far that is, and not a sample of a steady series.
    """

    x: Column
    y: Column
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """A drawn plot.

    Attributes:
        svg: The SVG element. Its colours are CSS variables: --one, --two, --quiet and --line. `data-points` holds its values.
        legend: The lines, each with its colour's name and its own; empty for a single line.
    """

    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def draw_lines(
    title: str,
    lines: Mapping[str, Line],
    first: float,
    last: float,
    axis: str,
    *,
    share: bool = False,
    log: bool | None = False,
    whole: bool = False,
) -> Plot | None:
    """Draws lines by their names; returns None if there is no data.

    Args:
        title: Tells this plot from the others of a page.
        lines: At most two lines and a dashed one, by their names; a single line is not named.
        first: Lower end of the x axis.
        last: Upper end of the x axis.
        axis: What the x axis shows.
        share: Whether the values are shares, from 0 to 1.
        log: Whether the value axis is logarithmic; None: if the values are positive and span more than a factor of 30.
        whole: Whether the ticks of the value axis are whole numbers.
    """
    known = {name: line for name, line in lines.items() if np.isfinite(line.y).any()}
    if not known:
        return None
    solid = iter(("one", "two"))
    colours = {name: "quiet" if line.dashed else next(solid) for name, line in known.items()}
    with _plot(title) as (figure, axes):
        for name, line in known.items():
            _draw(axes, line, _INKS[colours[name]])
        values = np.concatenate([line.y[np.isfinite(line.y)] for line in known.values()])
        _scale(axes, values, share, _is_wide(values) if log is None else log, whole)
        axes.set_xlim(first, max(last, first + 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6 if last < 1e5 else 4, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")
        axes.set_xlabel(axis)
        legend = tuple((colours[name], name) for name in known) if len(lines) > 1 else ()
        return Plot(_svg(figure, axes, _ends(title, known, share), axis, known, share), legend)


def draw_distribution(title: str, counts: Column, axis: str) -> Plot | None:
    """Draws the share of each whole number from 0 on as a bar, given how often each occurs; returns None for no count."""
    if not counts.sum() > 0:
        return None
    last = int(np.flatnonzero(counts)[-1])
    width = -(-(last + 1) // _MAX_BARS)
    bars = np.add.reduceat(counts, np.arange(0, last + 1, width)) / counts.sum()
    at = width * np.arange(len(bars), dtype=np.float64) + (width - 1) / 2
    with _plot(title) as (figure, axes):
        axes.bar(at, bars, 0.85 * width, color=BLUE)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.yaxis.set_major_formatter(_formatter(share=True))
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(axis)
        label = f"{title}: most often {np.argmax(counts):,}, in {counts.max() / counts.sum():.1%} of the commits"
        return Plot(_svg(figure, axes, label, axis, {"share": Line(at, bars)}, True, bar=width))


@contextmanager
def _plot(title: str) -> Iterator[tuple[Figure, Axes]]:
    """An empty plot in the style of all. The same plot gives the same SVG every time."""
    style: Any = {**STYLE, **_SVG, "svg.hashsalt": title}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the text stays text: the browser has the font
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        axes = figure.add_axes((_LEFT, _BOTTOM, _RIGHT - _LEFT, _TOP - _BOTTOM))
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        yield figure, axes


def _draw(axes: Axes, line: Line, colour: str) -> None:
    drawn = line if line.dots else _with_gaps(line)
    axes.plot(
        drawn.x,
        np.where(np.isfinite(drawn.y), drawn.y, np.nan),
        "--" if line.dashed else "-",
        color=colour,
        marker="o" if line.dots or len(drawn.y) == 1 else None,
        markersize=3,
    )


def _is_wide(values: Column) -> bool:
    return bool(values.min() > 0 and values.max() > _WIDE * values.min())


def _scale(axes: Axes, values: Column, share: bool, log: bool, whole: bool) -> None:
    """Scales the value axis for these finite values."""
    if log and (values > 0).any():
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter(_formatter(share) if high < 10 * low else NullFormatter())
        axes.text(0, 1.03, "logarithmic scale", transform=axes.transAxes)
    else:
        highest = 1.0 if share else values.max()
        axes.set_ylim(axes.get_ylim()[0] if (values < 0).any() else 0, 1.04 * highest if highest > 0 else None)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole))
    axes.yaxis.set_major_formatter(_formatter(share))  # after the scale, which brings its own


def _with_gaps(line: Line) -> Line:
    """The line with NaN for missing samples, so that no line is drawn across the gap."""
    steps = np.diff(line.x)
    holes = np.flatnonzero(steps > 1.5 * steps.min(initial=np.inf)) + 1
    return Line(np.insert(line.x, holes, line.x[holes - 1]), np.insert(line.y, holes, np.nan))


def _formatter(share: bool) -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{100 * value:.4g}%" if share else f"{value:.6g}")


def _ends(title: str, lines: Mapping[str, Line], share: bool) -> str:
    """The plot in words: the first and last value of each line."""
    form = "{:.1%}" if share else "{:.4g}"
    ends = {name: line.y[np.isfinite(line.y)][[0, -1]] for name, line in lines.items()}
    return f"{title}. " + "; ".join(
        f"{name}: from {form.format(begin)} to {form.format(end)}" for name, (begin, end) in ends.items()
    )


def _svg(figure: Figure, axes: Axes, label: str, axis: str, lines: Mapping[str, Line], share: bool, bar: int = 0) -> str:
    """The figure as an SVG element with its label and its values, in the colours of the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=_NO_METADATA)
    inside = out.getvalue().partition("<svg")[2].partition(">")[2]
    inside = re.sub(r"<defs>\s*<style.*?</defs>", "", inside, count=1, flags=re.DOTALL)  # it would be the whole page's style
    inside = re.sub(r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib)[._]\w*"', "", inside)  # all plots have them
    for ink, variable in _THEME.items():
        inside = inside.replace(ink, variable)
    width, height = 72 * _WIDTH, 72 * _HEIGHT
    points = {
        "axis": axis, "share": share, "bar": bar, "from": axes.get_xlim()[0], "to": axes.get_xlim()[1],
        "left": round(_LEFT * width, 2), "right": round(_RIGHT * width, 2),
        "top": round((1 - _TOP) * height, 2), "bottom": round((1 - _BOTTOM) * height, 2),
        "lines": [[name, *_values(line)] for name, line in lines.items()],
    }  # fmt: skip
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    data = html.escape(json.dumps(points, separators=(",", ":")))
    image = f'role="img" aria-label="{html.escape(label)}" data-points="{data}"'
    return f'<svg {spaces} viewBox="0 0 {width:g} {height:g}" {image}>{inside}'


def _values(line: Line) -> tuple[list[float], list[float]]:
    """The line's finite values and where they are, as short numbers."""
    known = np.isfinite(line.y)
    return _short(line.x[known], 7), _short(line.y[known], 4)


def _short(values: Iterable[float], digits: int) -> list[float]:
    rounded = [float(f"{value:.{digits}g}") for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]
