"""A run's results as a picture: turns per second of every contender, a panel for each size and number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.peers.results import Cell, Results, Row
from benchmarks.peers.tables import rate

_COLORS = {"ours": "#d1495b", "peer": "#30638e", "floor": "#b8b8b8"}
_PLAIN = 0.45  # opacity of what applies no GEM
_LEGEND = (
    ("this server, GEM", _COLORS["ours"], 1.0),
    ("others, GEM", _COLORS["peer"], 1.0),
    ("others, plain add", _COLORS["peer"], _PLAIN),
    ("floors: only a part of the work", _COLORS["floor"], 1.0),
)


def draw(results: Results, path: Path) -> None:
    """Writes a PNG."""
    cells = results.cells()
    sizes, workers = sorted({cell.parameters for cell in cells}), sorted({cell.workers for cell in cells})
    most = max(len(results.rows(cell)) for cell in cells)
    plt.switch_backend("Agg")
    figure, panels = plt.subplots(
        len(sizes), len(workers), figsize=(7.2 * len(workers), (0.9 + 0.27 * most) * len(sizes) + 0.6), squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for i, size in enumerate(sizes):
        for j, count in enumerate(workers):
            _panel(panels[i][j], Cell(size, count), list(results.rows(Cell(size, count)).values()))
    handles: list[Any] = [Patch(color=color, alpha=alpha, label=label) for label, color, alpha in _LEGEND]
    handles.append(Line2D([], [], color="black", linewidth=1, label="lowest to highest repeat"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if len(workers) == 1 else 5, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axes: Any, cell: Cell, rows: list[Row]) -> None:
    axes.set_title(f"{_millions(cell.parameters)} parameters, {cell.workers} workers", loc="left", fontweight="bold")
    axes.set_xlabel("round trips per second, all workers together (log scale)")
    if not rows:
        axes.set_axis_off()
        return
    places = range(len(rows), 0, -1)
    for place, row in zip(places, rows, strict=True):
        lowest, highest = row.spread
        plain = row.kind == "peer" and row.rule != "gem"
        axes.barh(place, row.rate, height=0.72, color=_COLORS[row.kind], alpha=_PLAIN if plain else 1)
        axes.plot([lowest, highest], [place, place], color="black", linewidth=1)
        axes.annotate(rate(row.rate), (highest, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(row.spread[0] for row in rows) / 2, max(row.spread[1] for row in rows) * 2)
    axes.set_yticks(places, [row.label for row in rows], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.kind == "ours" else "normal")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.3g} million" if parameters >= 1_000_000 else f"{parameters:,}"
