"""The page docs/results/unequal-data and its picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.lib import page as markdown
from benchmarks.lib.style import save
from benchmarks.unequal_data.figures import draw
from benchmarks.unequal_data.runs import GRADIENTS, METHODS, SEEDS, SLOWER, WORKERS, Case, Outcome, reported


def write_page(known: Mapping[Case, Outcome], folder: Path) -> Path:
    """Writes README.md and its picture, as far as the results for them are there. Returns the page's path."""
    save(draw(known), folder / "unequal-data.png")
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
