"""Each figure's content, computed from what was measured, and its picture, drawn from the content alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.style import save
from benchmarks.paper.figures.content import CONTENT, Content
from benchmarks.paper.figures.pictures import PICTURES
from benchmarks.paper.statistics import Measured


def draw_figure(name: str, measured: list[Measured], folder: Path) -> None:
    """Writes NAME.json and NAME.png; without results, the picture of a stored NAME.json if there is one."""
    stored = folder / f"{name}.json"
    if measured:
        CONTENT[name](measured).save(stored)
    if stored.exists():
        save(PICTURES[name](Content.load(stored)), stored.with_suffix(".png"))
