"""The result pages, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.lib.results import write


def filled(template: Path, page: Path, **parts: object) -> Path:
    """Writes a page: the template with its parts in place of their names in braces. Returns its path."""
    write(page, template.read_text(encoding="utf-8").format(**parts))
    return page


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table: a line for the heads, one that divides, and one for each row."""
    return "\n".join([row(heads), "|" + "---|" * len(heads), *map(row, rows)])


def row(cells: Sequence[object]) -> str:
    """A line of a table."""
    return "".join(f"| {cell} " if cell != "" else "| " for cell in cells) + "|"


def short(value: float) -> str:
    """A number with three significant digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(number: int, what: str = "worker") -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{number} {what}{'s' if number != 1 else ''}"
