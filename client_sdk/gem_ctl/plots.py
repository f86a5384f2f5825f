"""Draws the report's plots as SVG, with Matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from gem_api.curves import Column
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

_COLOURS = ("#1f4e79", "#c0392b", "#e08e0b")
_STYLE: Any = {"svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif", "text.parse_math": False}
_MAX_BARS = 50


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


def draw_lines(
    title: str, lines: Mapping[str, Line], first: float, last: float, axis: str, *, share: bool = False, log: bool = False
) -> str:
    """Draws lines by their names as an SVG element; returns an empty string if there is no data.

    Args:
        title: Tells this plot from the others of a page.
        lines: At most three lines by their names; a single line is not named.
        first: Lower end of the x axis.
        last: Upper end of the x axis.
        axis: What the x axis shows.
        share: Whether the values are shares, from 0 to 1.
        log: Whether the value axis is logarithmic.
    """
    known = {name: line for name, line in lines.items() if np.isfinite(line.y).any()}
    if not known:
        return ""
    with _plot(title) as (figure, axes):
        for colour, (name, line) in zip(_COLOURS, known.items(), strict=False):
            drawn = line if line.dots else _with_gaps(line)
            axes.plot(
                drawn.x,
                np.where(np.isfinite(drawn.y), drawn.y, np.nan),
                "--" if line.dashed else "-",
                color=colour,
                linewidth=1.6,
                marker="o" if line.dots or len(drawn.y) == 1 else None,
                markersize=3,
                label=name,
            )
        if len(lines) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False)
        axes.grid(alpha=0.25)
        values = np.concatenate([line.y[np.isfinite(line.y)] for line in known.values()])
        _scale(axes, values, share, log)
        axes.set_xlim(first, max(last, first + 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")
        axes.set_xlabel(axis)
        return _svg(figure)


def draw_distribution(title: str, counts: Column, axis: str) -> str:
    """Draws the share of each whole number from 0 on as a bar, given how often each occurs; an empty string for no count."""
    if not counts.sum() > 0:
        return ""
    last = int(np.flatnonzero(counts)[-1])
    width = -(-(last + 1) // _MAX_BARS)
    bars = np.add.reduceat(counts, np.arange(0, last + 1, width)) / counts.sum()
    with _plot(title) as (figure, axes):
        axes.bar(width * np.arange(len(bars)) + (width - 1) / 2, bars, 0.85 * width, color=_COLOURS[0])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_formatter(_formatter(share=True))
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, axis="y")
        axes.set_xlabel(axis)
        return _svg(figure)


@contextmanager
def _plot(title: str) -> Iterator[tuple[Figure, Axes]]:
    """An empty plot in the style of all. The same plot gives the same SVG every time."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the text stays text: the browser has the font
        figure = Figure(figsize=(6.2, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes


def _scale(axes: Axes, values: Column, share: bool, log: bool) -> None:
    """Scales the value axis for these finite values."""
    if log and (values > 0).any():
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter(_formatter(share) if high < 10 * low else NullFormatter())
    else:
        axes.set_ylim(axes.get_ylim()[0] if (values < 0).any() else 0, 1 if share else None)
    axes.yaxis.set_major_formatter(_formatter(share))  # after the scale, which brings its own


def _with_gaps(line: Line) -> Line:
    """The line with NaN for missing samples, so that no line is drawn across the gap."""
    steps = np.diff(line.x)
    holes = np.flatnonzero(steps > 1.5 * steps.min(initial=np.inf)) + 1
    return Line(np.insert(line.x, holes, line.x[holes - 1]), np.insert(line.y, holes, np.nan))


def _formatter(share: bool) -> FuncFormatter | PercentFormatter:
    return PercentFormatter(xmax=1, decimals=None) if share else FuncFormatter(lambda value, _: f"{value:.6g}")


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
