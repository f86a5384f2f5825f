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
        wanted: The columns to return beside the workers' names and the version; None returns all.

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
    numeric = [name for name in names if name != "worker" and (wanted is None or name in {"version", *wanted})]
    places = [names.index(name) for name in numeric]
    try:
        fields, numbers = _columns(rows, len(names), places)
    except ValueError:
        rows = [row for row in rows if _is_numeric(row, places)]
        fields, numbers = _columns(rows, len(names), places)
    columns = dict(zip(numeric, numbers, strict=True))
    empty = fields[names.index("loss")].count("") if "loss" in columns else 0
    nonfinite = len(rows) - int(np.isfinite(columns["loss"]).sum()) - empty if "loss" in columns else 0
    workers = list(fields[names.index("worker")])
    sound = (columns["version"] >= 0) & (columns["version"] < _MAX_VERSION)
    if not sound.all():
        workers = [worker for worker, keep in zip(workers, sound, strict=True) if keep]
        columns = {name: column[sound] for name, column in columns.items()}
    return Piece(workers, columns, nonfinite, damaged + len(lines) - len(workers))


def _columns(rows: list[list[str]], count: int, places: list[int]) -> tuple[list[tuple[str, ...]], list[Column]]:
    """The fields of each column, and the numbers of those at `places`. Raises ValueError for a field that is not a number."""
    fields = list(zip(*rows, strict=True)) or [()] * count
    filled = (fields[place] if "" not in fields[place] else [field or "nan" for field in fields[place]] for place in places)
    return fields, [np.fromiter(map(float, column), np.float64, len(rows)) for column in filled]


def _fields(line: str) -> list[str]:
    """The fields of a line; none if it is damaged. Only a worker's name may be quoted."""
    if '"' not in line:
        return line.rstrip("\r\n").split(",")
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _is_numeric(row: list[str], places: list[int]) -> bool:
    try:
        for place in places:
            float(row[place] or "nan")
    except ValueError:
        return False
    return True
