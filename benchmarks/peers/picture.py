"""The results as a picture: round trips per second of every contender, one panel for each model size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.peers.claims import rate
from benchmarks.peers.results import Cell, Results, Row

_COLORS = {"ours": "#d1495b", "peer": "#30638e", "floor": "#b8b8b8"}
_PLAIN = 0.45  # opacity of contenders that do not apply GEM
_LEGEND = (
    ("this server, GEM", _COLORS["ours"], 1.0),
    ("others, GEM", _COLORS["peer"], 1.0),
    ("others, plain add", _COLORS["peer"], _PLAIN),
    ("floors: only part of the work", _COLORS["floor"], 1.0),
)


def draw(results: Results, path: Path) -> None:
    """Writes a PNG for the fewest workers measured: a panel for each size, contenders in the same order in all. Contenders that
    differ in their settings alone are one row, with the fastest settings, as in the claims."""
    cells = [cell for cell in results.cells() if cell.workers == min(each.workers for each in results.cells())]
    fastest = {cell: _fastest(results.rows(cell)) for cell in cells}
    labels = _order(fastest.values())
    plt.switch_backend("Agg")
    figure, panels = plt.subplots(
        1, len(cells), figsize=(3.2 + 2.9 * len(cells), 1.5 + 0.24 * len(labels)), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    figure.suptitle(f"Round trips per second of {cells[0].workers} workers together (log scale)", fontweight="bold")
    for axes, cell in zip(panels[0], cells, strict=True):
        _panel(axes, cell, list(fastest[cell].values()), labels)
    _name_contenders(panels[0][0], labels)
    handles: list[Any] = [Patch(color=color, alpha=alpha, label=label) for label, color, alpha in _LEGEND]
    handles.append(Line2D([], [], color="black", linewidth=1, label="lowest to highest repeat"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if len(cells) == 1 else 5, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _fastest(rows: dict[str, Row]) -> dict[str, Row]:
    """By the name that contenders share: the fastest of them."""
    found: dict[str, Row] = {}
    for row in rows.values():  # the fastest first
        found.setdefault(row.of, row)
    return found


def _order(cells: Iterable[dict[str, Row]]) -> dict[str, Row]:
    """One row per contender: this server, peers with GEM, peers that only add, floors; within each group the fastest first."""
    rows: dict[str, Row] = {}
    for each in cells:
        rows = each | rows
    kinds = list(_COLORS)
    return dict(sorted(rows.items(), key=lambda item: (kinds.index(item[1].kind), _is_plain(item[1]), -item[1].rate)))


def _is_plain(row: Row) -> bool:
    """Whether this is a peer that only adds gradients."""
    return row.kind == "peer" and row.rule != "gem"


def _panel(axes: Any, cell: Cell, rows: list[Row], order: dict[str, Row]) -> None:
    axes.set_title(f"{_millions(cell.parameters)} parameters", loc="left", fontsize=11)
    if not rows:
        axes.set_axis_off()
        return
    heights = {name: -index for index, name in enumerate(order)}
    for row in rows:
        height, (lowest, highest) = heights[row.of], row.spread
        axes.barh(height, row.rate, height=0.72, color=_COLORS[row.kind], alpha=_PLAIN if _is_plain(row) else 1)
        axes.plot([lowest, highest], [height, height], color="black", linewidth=1)
        axes.annotate(rate(row.rate), (highest, height), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlim(min(row.spread[0] for row in rows) / 2, max(row.spread[1] for row in rows) * 3)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _name_contenders(axes: Any, order: dict[str, Row]) -> None:
    axes.set_yticks(
        [-index for index in range(len(order))], [row.label.removesuffix(", one thread") for row in order.values()], fontsize=9
    )
    for label, row in zip(axes.get_yticklabels(), order.values(), strict=True):
        label.set_fontweight("bold" if row.kind == "ours" else "normal")


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.3g} million" if parameters >= 1_000_000 else f"{parameters:,}"
