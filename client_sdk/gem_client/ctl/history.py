"""Reads a run's history: the file that `gem-server --history` writes, with a line of CSV for each commit."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
_PIECE = 20_000  # lines read at a time
_MAX_LINE = 1 << 16  # characters; a worker's name has at most 128
_MAX_VERSION = float(1 << 62)


class HistoryError(ValueError):
    """The file is not a history; the message says why."""


@dataclass(frozen=True)
class Piece:
    """Some successive lines of a history.

    Attributes:
        workers: The name of each commit's worker.
        columns: The other columns by name, float64, shape (lines,); NaN for an empty field.
        nonfinite_losses: Number of commits whose loss was NaN or infinite. An empty field is a commit without a loss.
        damaged: Number of lines that were left out, because they are not lines of a history.
    """

    workers: list[str]
    columns: dict[str, Column]
    nonfinite_losses: int
    damaged: int


def read_history(path: Path, wanted: Collection[str] | None = None) -> Iterator[Piece]:
    """Reads the file piece by piece, so that a history of any length fits into memory.

    A last line without an end is left out: the server is still writing it, or was killed.

    Args:
        path: The file.
        wanted: The columns to return beside the workers' names; None returns all.

    Raises:
        HistoryError: The file does not begin as a history does.
        OSError: It can't be read.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        names = file.readline(_MAX_LINE).rstrip("\r\n").split(",")
        if missing := {"version", "worker"} - set(names):
            columns = " and ".join(sorted(missing))
            raise HistoryError(f"{path} is not a history of gem-server: its first line names no column {columns}")
        lines = iter(lambda: file.readline(_MAX_LINE), "")
        while some := list(islice(lines, _PIECE)):
            damaged = sum(not line.endswith("\n") for line in some[:-1])
            yield _piece(names, [line for line in some if line.endswith("\n")], wanted, damaged)


def _piece(names: list[str], lines: list[str], wanted: Collection[str] | None, damaged: int) -> Piece:
    rows = [row for row in map(_fields, lines) if len(row) == len(names)]
    numeric = [number for number, name in enumerate(names) if name != "worker"]
    try:
        numbers = _numbers(rows, numeric)
    except ValueError:
        rows = [row for row in rows if _is_numeric(row, numeric)]
        numbers = _numbers(rows, numeric)
    columns = {names[number]: column for number, column in zip(numeric, numbers, strict=True)}
    sound = (columns["version"] >= 0) & (columns["version"] < _MAX_VERSION)
    if not sound.all():
        rows = [row for row, keep in zip(rows, sound, strict=True) if keep]
        columns = {name: column[sound] for name, column in columns.items()}
    nonfinite = 0
    if "loss" in names:
        empty = [row[names.index("loss")] for row in rows].count("")
        nonfinite = len(rows) - int(np.isfinite(columns["loss"]).sum()) - empty
    place = names.index("worker")
    kept = {name: column for name, column in columns.items() if wanted is None or name in wanted}
    return Piece([row[place] for row in rows], kept, nonfinite, damaged + len(lines) - len(rows))


def _fields(line: str) -> list[str]:
    """The fields of a line; none if it is damaged. Only a worker's name may be quoted."""
    if '"' not in line:
        return line.rstrip("\r\n").split(",")
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _numbers(rows: list[list[str]], numeric: list[int]) -> list[Column]:
    """The columns with these positions. Raises ValueError for a field that is not a number."""
    columns = list(zip(*rows, strict=True)) or [()] * (max(numeric) + 1)
    return [np.array([float(field) if field else np.nan for field in columns[number]], np.float64) for number in numeric]


def _is_numeric(row: list[str], numeric: list[int]) -> bool:
    try:
        for number in numeric:
            float(row[number] or "nan")
    except ValueError:
        return False
    return True
