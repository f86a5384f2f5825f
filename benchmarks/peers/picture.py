"""The results as a picture: round trips per second of every contender, one panel for each model size."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.lib.page import short
from benchmarks.lib.style import BLUE, GREY, ORANGE, legend, panels, styled
from benchmarks.peers.results import Cell, Results, Row, cells, rows

_COLOURS = {"ours": BLUE, "peer": ORANGE, "floor": GREY}
_PALE = 0.5  # opacity of contenders that do not apply GEM
_LEGEND = (
    Patch(color=BLUE, label="this server, GEM"),
    Patch(color=ORANGE, label="others, GEM"),
    Patch(color=ORANGE, alpha=_PALE, label="others, plain add"),
    Patch(color=GREY, alpha=_PALE, label="for comparison: only a part of the work"),
)


@styled
def figure(results: Results) -> Figure:
    """For the fewest workers measured: a panel for each size, contenders in the same order in all. Contenders that differ in
    their settings alone are one row, with the fastest settings, as in the claims."""
    shown = [cell for cell in cells(results) if cell.workers == min(each.workers for each in cells(results))]
    fastest = {cell: _fastest(rows(results, cell)) for cell in shown}
    order = _order(fastest.values())
    title = f"Round trips per second of {shown[0].workers} workers together (lines: lowest to highest repeat)"
    drawn, places = panels(1, len(shown), title, 0.6 + 0.26 * len(order), sharey=True)
    for axes, cell in zip(places, shown, strict=True):
        _panel(axes, cell, fastest[cell], list(order))
    places[0].set_yticks(range(len(order)), [_name(row) for row in order.values()])
    places[0].invert_yaxis()
    for label, row in zip(places[0].get_yticklabels(), order.values(), strict=True):
        label.set_fontweight("bold" if row.contender.kind == "ours" else "normal")
    legend(drawn, *_LEGEND, columns=2)
    return drawn


def _name(row: Row) -> str:
    return row.contender.label.removesuffix(", one thread").removeprefix("floor: ")


def _fastest(rows: dict[str, Row]) -> dict[str, Row]:
    """By the name that contenders share: the fastest of them."""
    found: dict[str, Row] = {}
    for row in rows.values():  # the fastest first
        found.setdefault(row.contender.of, row)
    return found


def _order(cells: Iterable[dict[str, Row]]) -> dict[str, Row]:
    """One row per contender: this server, peers with GEM, peers that only add, bounds; in each group the fastest first."""
    rows: dict[str, Row] = {}
    for each in cells:
        rows = each | rows
    kinds = list(_COLOURS)
    order = sorted(rows.items(), key=lambda item: (kinds.index(item[1].contender.kind), _is_plain(item[1]), -item[1].rate))
    return dict(order)


def _is_plain(row: Row) -> bool:
    """Whether this is a peer that only adds gradients."""
    return row.contender.kind == "peer" and row.contender.rule != "gem"


def _panel(axes: Axes, cell: Cell, rows: dict[str, Row], order: list[str]) -> None:
    """Bars from zero, with a line from the lowest to the highest repeat."""
    for height, name in enumerate(order):
        if name not in rows:
            axes.text(0, height, " not measured", va="center", fontsize=8, color=GREY)
            continue
        row, (lowest, highest) = rows[name], rows[name].spread
        pale = _is_plain(row) or row.contender.kind == "floor"
        axes.barh(height, row.rate, height=0.72, color=_COLOURS[row.contender.kind], alpha=_PALE if pale else 1)
        axes.plot([lowest, highest], [height, height], color="black", linewidth=1)
        axes.annotate(short(row.rate), (highest, height), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set(title=f"{_millions(cell.parameters)} parameters", xlabel="round trips per second")
    axes.set_xlim(0, 1.3 * max(row.spread[1] for row in rows.values()))
    axes.grid(axis="y", visible=False)


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.3g} million" if parameters >= 1_000_000 else f"{parameters:,}"
