"""Tables that fit the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size


def terminal_width() -> int:
    """Columns of the terminal, or COLUMNS; 80 if standard output is none."""
    return shutil.get_terminal_size().columns


def fitted(rows: Sequence[Sequence[str]], width: int, spare: Sequence[str] = ()) -> list[str]:
    """The lines of a table, at most `width` wide. Its first row is the header. Its first column names the rows: names that take
    more than two fifths of the room are cut in their middle.

    Args:
        rows: The header and the rows, of printable texts.
        width: Columns of the terminal.
        spare: Headers of the columns that are left out if there is no room, the first one first.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], max(1, 2 * width // 5))
    shown = list(range(len(widths)))
    for name in spare:
        if sum(widths[each] + 1 for each in shown) - 1 > width:
            shown.remove(rows[0].index(name))
    return [" ".join(_aligned(row[each], widths[each], left=each == 0) for each in shown).rstrip() for row in rows]


def _aligned(text: str, width: int, left: bool) -> str:
    if (beyond := cell_len(text) - width) > 0:
        head = (width - 1) // 2
        kept = set_cell_size(text, head).rstrip() + "…"
        tail = text[-(width - cell_len(kept)) :]
        while cell_len(tail) > width - cell_len(kept):
            tail = tail[1:]
        text, beyond = kept + tail, cell_len(kept + tail) - width
    return text + " " * -beyond if left else " " * -beyond + text
