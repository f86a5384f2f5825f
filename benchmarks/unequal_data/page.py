"""The page docs/results/unequal-data and its picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.lib import page as markdown
from benchmarks.paper.statistics import spread
from benchmarks.paper.style import OTHERS, RULE_COLOURS, panels
from benchmarks.unequal_data.runs import GRADIENTS, METHODS, RARE, SEEDS, SLOWER, WORKERS, Case, Outcome, reported

_COLOURS = {**RULE_COLOURS, **dict(zip(("adamw", "dana", "rescaled", "synchronous"), OTHERS, strict=False))}


def write_page(known: Mapping[Case, Outcome], folder: Path) -> Path:
    """Writes README.md and its picture, as far as the results for them are there. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw(known, folder)
    body = (Path(__file__).parent / "page.txt").read_text(encoding="utf-8")
    missing = sum(reported(known, method, slower) is None for method in METHODS for slower in SLOWER)
    text = body.format(
        table=_table(known), gradients=f"{GRADIENTS:,}", workers=WORKERS, seeds=len(SEEDS), rates=len(METHODS["gem"].rates),
        missing=f" **{missing} cells are still to be run.**" if missing else "",
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder / "README.md"


def _table(known: Mapping[Case, Outcome]) -> str:
    heads = ["Method", *(f"{_degree(slower)}: on 8 and 9" for slower in SLOWER), "all digits, ten times slower", "rates"]
    rows = []
    for name, method in METHODS.items():
        found = [reported(known, name, slower) for slower in SLOWER]
        rare = [_percent([each.rare for each in one[1]]) if one else "–" for one in found]
        last = found[-1]
        total = _percent([each.accuracy for each in last[1]]) if last else "–"
        rates = ", ".join(f"{one[0]:g}" if one else "–" for one in found)
        rows.append([method.label, *rare, total, rates])
    return markdown.table(heads, rows)


def _degree(slower: int) -> str:
    return "equally fast" if slower == 1 else f"{slower} times slower"


def _percent(values: list[float]) -> str:
    mean, low, high = (100 * each(values) for each in (np.mean, min, max))
    return f"{mean:.0f} % ({low:.0f}–{high:.0f})"


def _draw(known: Mapping[Case, Outcome], folder: Path) -> None:
    drawing, grid = panels(1, 2, "", width=5.2)
    for axes, column, title in zip(grid, ("rare", "accuracy"), (_of_rare(), "All digits"), strict=True):
        for place, (name, method) in enumerate(METHODS.items()):
            found = {slower: one[1] for slower in SLOWER if (one := reported(known, name, slower))}
            values = [spread(getattr(each, column) for each in outcomes) for outcomes in found.values()]
            if found:
                slowness = [slower * 1.02 ** (place - len(METHODS) // 2) for slower in found]  # side by side
                drawing.points(axes, title, method.label, slowness, values, _COLOURS[name], 100.0)
        axes.set(xlabel="the last worker's time for a gradient, times the others'", title=title, xscale="log", ylim=(-3, 100))
        axes.set_xticks(SLOWER, [str(each) for each in SLOWER])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("held-out accuracy, %")
    grid[1].legend(fontsize=8, loc="lower left")
    drawing.save(folder, "unequal-data")


def _of_rare() -> str:
    return f"The digits {' and '.join(map(str, RARE))}, which only the last worker has"
