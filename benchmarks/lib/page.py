"""Parts of the result pages, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table: a line for the heads, one that divides, and one for each row."""
    return "\n".join([row(heads), "|" + "---|" * len(heads), *map(row, rows)])


def row(cells: Sequence[object]) -> str:
    """A line of a table."""
    return "".join(f"| {cell} " if cell != "" else "| " for cell in cells) + "|"


def count(number: int, what: str = "worker") -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{number} {what}{'s' if number != 1 else ''}"
