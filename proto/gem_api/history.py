"""A run's history, the file that `gem-server --history` writes: a line of CSV for each commit. Its columns and its reader.

The reader holds one piece of the file at a time, so that a history of any length fits into memory.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TextIO

import numpy as np

from gem_api.curves import Column

COLUMNS = (
    "version", "ticket", "unix_seconds", "worker", "sequence", "discarded", "staleness", "loss", "samples",
    "pi_median", "pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy",
)  # fmt: skip
# Where a spreadsheet would find a formula in a worker's name: at its beginning, or after a semicolon, which ends a cell in some
# languages.
_FORMULA = r"(?=[=+\-@＝＋－＠])"
_CELL = r"((?:^|;)[ \"']*)"
_PIECE = 1 << 18  # characters read at a time
_MAX_LINE = 1 << 16  # characters; a worker's name has at most 128
_MAX_VERSION = float(1 << 62)


class HistoryError(ValueError):
    """The file is not a history; the message says why."""


def evaluations_beside(history: Path) -> Path:
    """The file in which the server keeps the evaluations of a run whose history this is."""
    return history.with_suffix(".evaluations.json")


def written_name(worker: str) -> str:
    """A worker's name as the history has it: with an apostrophe before what a spreadsheet would run as a formula."""
    return re.sub(_CELL + _FORMULA, r"\1'", worker)


def _read_name(field: str) -> str:
    """The name that `written_name` was given."""
    return re.sub(_CELL + "'" + _FORMULA, r"\1", field)


@dataclass(frozen=True)
class Piece:
    """Some successive lines of a history.

    Attributes:
        workers: The name of each commit's worker.
        columns: The other columns by name, float64, shape (lines,); NaN for an empty field.
        nonfinite_losses: Number of commits whose loss was NaN or infinite. An empty field is a commit without a loss.
        damaged: Number of lines that were left out, because they are not lines of a history.
        names: The file's columns, in order.
        lines: The lines as they are in the file, without the damaged ones.
    """

    workers: list[str]
    columns: dict[str, Column]
    nonfinite_losses: int
    damaged: int
    names: Sequence[str] = ()
    lines: Sequence[str] = ()


def read_history(path: Path, wanted: Collection[str] | None = None) -> Iterator[Piece]:
    """Reads the file piece by piece.

    A last line without an end is left out: the server is still writing it, or was killed.

    A line is damaged if it is too long, or has NUL bytes, bytes that are not UTF-8, another number of fields, or text in place
    of a number.

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
        for lines in _pieces(file):
            yield _piece(names, lines, wanted)


def _pieces(file: TextIO) -> Iterator[list[str]]:
    """Some of the file's complete lines at a time."""
    lines, size = [], 0
    while line := file.readline(_MAX_LINE):
        if not line.endswith("\n"):
            if len(line) < _MAX_LINE:
                break  # the end of the file
            while (rest := file.readline(_MAX_LINE)) and not rest.endswith("\n"):
                pass
            line = "\n"  # stands for a line that is too long
        lines.append(line)
        size += len(line)
        if size >= _PIECE:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def _piece(names: list[str], lines: list[str], wanted: Collection[str] | None) -> Piece:
    rows = [(row, line) for row, line in zip(map(_fields, lines), lines, strict=True) if len(row) == len(names)]
    numeric = [name for name in names if name != "worker" and (wanted is None or name in {"version", *wanted})]
    places = [names.index(name) for name in numeric]
    try:
        fields, numbers = _columns([row for row, _ in rows], len(names), places)
    except ValueError:
        rows = [(row, line) for row, line in rows if _is_numeric(row, places)]
        fields, numbers = _columns([row for row, _ in rows], len(names), places)
    columns = dict(zip(numeric, numbers, strict=True))
    empty = fields[names.index("loss")].count("") if "loss" in columns else 0
    nonfinite = len(rows) - int(np.isfinite(columns["loss"]).sum()) - empty if "loss" in columns else 0
    sound = (columns["version"] >= 0) & (columns["version"] < _MAX_VERSION)
    kept = [line for _, line in rows]
    workers = [_read_name(field) if "'" in field else field for field in fields[names.index("worker")]]
    if not sound.all():
        kept, workers = list(compress(kept, sound)), list(compress(workers, sound))
        columns = {name: column[sound] for name, column in columns.items()}
    return Piece(workers, columns, nonfinite, len(lines) - len(kept), names, kept)


def _columns(rows: list[list[str]], count: int, places: list[int]) -> tuple[list[tuple[str, ...]], list[Column]]:
    """The fields of each column, and the numbers of those at `places`. Raises ValueError for a field that is not a number."""
    fields = list(zip(*rows, strict=True)) or [()] * count
    filled = (fields[place] if "" not in fields[place] else [field or "nan" for field in fields[place]] for place in places)
    return fields, [np.fromiter(map(float, column), np.float64, len(rows)) for column in filled]


def _fields(line: str) -> list[str]:
    """The fields of a line; none if it is damaged. Only a worker's name may be quoted."""
    if "\0" in line or "\ufffd" in line:  # the second stands for bytes that are not UTF-8
        return []
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
