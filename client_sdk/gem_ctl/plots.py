"""Draws panels as SVG, with Matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from gem_ctl.panels import Kind, Panel, Query
from gem_ctl.prometheus import Column, Series

PlottedQuery = tuple[Query, list[Series]]  # a panel's query, and the series that Prometheus returned for it
_COLOURS = ("#1f4e79", "#c0392b", "#e08e0b", "#2e7d4f", "#7d5ba6", "#5d6d7e", "#16a0a0", "#b5651d", "#d16ba5", "#8c8c00")
_STYLE: Any = {"svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif", "text.parse_math": False}
_MAX_BARS = 50
_MAX_NAMED = 10  # more series than that are drawn alike and not named


def draw(panel: Panel, plotted: list[PlottedQuery], begin: float, end: float, axis: str = "") -> str:
    """Draws the panel as an SVG element; returns an empty string if there is no data.

    The x axis goes from `begin` to `end`. Those are Unix seconds, and its ticks count from `begin`, unless `axis` says what
    it shows.
    """
    if not any(np.isfinite(one.values).any() for _, series in plotted for one in series):
        return ""
    with _plot(panel.title) as (figure, axes):
        if panel.kind is Kind.HEATMAP:
            _draw_heatmap(axes, plotted[0][1])
        else:
            _draw_lines(axes, panel, plotted)
        unit, seconds = _time_unit(end - begin)
        axes.set_xlim(begin, max(end, begin + 1))
        if axis:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
            axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")
        else:
            axes.xaxis.set_major_locator(_Since(begin, seconds))
            axes.xaxis.set_major_formatter(lambda at, _: f"{(at - begin) / seconds:.4g}")
        axes.set_xlabel(axis or unit)
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
        axes.yaxis.set_major_formatter(_formatter("percentunit"))
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


def _draw_lines(axes: Axes, panel: Panel, plotted: list[PlottedQuery]) -> None:
    lines = [(query, one if query.dots else _with_gaps(one)) for query, several in plotted for one in several]
    few = len(lines) <= _MAX_NAMED
    for number, (query, one) in enumerate(lines):
        style, name = "--" if query.dashed else "-", _name(query.legend, one)
        colour, width = (_COLOURS[number % len(_COLOURS)], 1.6) if few else (_COLOURS[0], 0.7)
        values = np.where(np.isfinite(one.values), one.values, np.nan)
        marker = "o" if query.dots or len(one.values) == 1 else None
        axes.plot(
            one.times,
            values,
            style,
            color=colour,
            linewidth=width,
            marker=marker,
            markersize=3,
            alpha=1 if few else 0.5,
            label=name,
        )
    if not few:
        axes.set_title(f"{len(lines)} series", loc="right", fontsize=8, color="#666666")
    elif axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False)
    axes.grid(alpha=0.25)
    values = np.concatenate([one.values[np.isfinite(one.values)] for _, one in lines])
    if panel.log and (values > 0).any():
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter(_formatter(panel.unit) if high < 10 * low else NullFormatter())
    else:
        axes.set_ylim(axes.get_ylim()[0] if (values < 0).any() else 0, panel.most)
    axes.yaxis.set_major_formatter(_formatter(panel.unit))  # after the scale, which brings its own


def _draw_heatmap(axes: Axes, buckets: list[Series]) -> None:
    """Draws one row per bucket, whatever its width, with colours on a logarithmic scale."""
    ordered = sorted(buckets, key=lambda one: float(one.labels["le"]))
    times = np.unique(np.concatenate([one.times for one in ordered]))
    below = np.array([_at(times, one) for one in ordered])
    inside = np.diff(below, axis=0, prepend=0).clip(min=0)
    filled = np.flatnonzero(inside.sum(axis=1) > 0)
    if not filled.size:
        return
    rows = slice(filled[0], filled[-1] + 1)
    bounds = [float(one.labels["le"]) for one in ordered][rows]
    shown = np.ma.masked_less_equal(inside[rows], 0)
    edges = np.append(times, times[-1] + (times[-1] - times[0]) / max(1, len(times) - 1) if len(times) > 1 else times[-1] + 1)
    colours = LogNorm(vmin=max(1e-9, float(shown.min())), vmax=max(2e-9, float(shown.max()) * 1.001))
    axes.pcolormesh(edges, np.arange(len(bounds) + 1), shown, cmap="YlOrBr", norm=colours, rasterized=True)
    every = -(-len(bounds) // 8)
    axes.set_yticks(np.arange(len(bounds))[::every] + 1, [f"≤ {bound:.4g}" for bound in bounds][::every])


class _Since(MaxNLocator):
    """Places ticks at round times since the beginning."""

    def __init__(self, begin: float, unit: float) -> None:
        super().__init__(nbins=8, steps=[1, 2, 5, 10])
        self._begin, self._unit = begin, unit

    def tick_values(self, vmin: float, vmax: float) -> Column:  # type: ignore[override]
        ticks = super().tick_values((vmin - self._begin) / self._unit, (vmax - self._begin) / self._unit)
        return np.asarray(ticks) * self._unit + self._begin


def _time_unit(span: float) -> tuple[str, float]:
    if span < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if span < 3 * 3600 else ("hours", 3600.0)


def _with_gaps(one: Series) -> Series:
    """The series with NaN for missing samples, so that no line is drawn across the gap."""
    steps = np.diff(one.times)
    holes = np.flatnonzero(steps > 1.5 * steps.min(initial=np.inf)) + 1
    return Series(one.labels, np.insert(one.times, holes, one.times[holes - 1]), np.insert(one.values, holes, np.nan))


def _at(times: Column, one: Series) -> Column:
    """The series interpolated at other times; 0 if it has no finite value."""
    known = np.isfinite(one.values)
    return np.interp(times, one.times[known], one.values[known]) if known.any() else np.zeros_like(times)


def _name(legend: str, one: Series) -> str:
    """The legend with {{label}} filled in."""
    name = re.sub(r"{{\s*(\w+)\s*}}", lambda match: one.labels.get(match[1], ""), legend)
    return f" {name}" if name.startswith("_") else name  # Matplotlib leaves out what begins with an underscore


def _formatter(unit: str) -> FuncFormatter | EngFormatter | PercentFormatter:
    if unit == "percentunit":
        return PercentFormatter(xmax=1, decimals=None)
    if unit in ("bytes", "Bps"):
        return EngFormatter("B" if unit == "bytes" else "B/s")
    if unit == "s":
        return EngFormatter("s")
    return FuncFormatter(lambda value, _: f"{value:.6g}")


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
