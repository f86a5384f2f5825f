"""The history file: a line of CSV for each commit that was applied, or discarded by the rule. For plots and audits."""

from __future__ import annotations

import csv
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from gem_api.process.logs import Logger

from gem_server.apply_loop import Timing
from gem_server.core.facts import Applied
from gem_server.telemetry.curves import MAX_POINTS, Point

COLUMNS = (
    "version", "ticket", "unix_seconds", "worker", "sequence", "discarded", "staleness", "loss", "samples",
    "pi_median", "pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy",
)  # fmt: skip
MAX_WAITING = 1 << 20  # lines kept in memory while the disk fails; beyond that the oldest are dropped
_TICKET = COLUMNS.index("ticket")
_LONGEST_LINE = 1 << 16  # characters; a worker's name has at most 128
_SMOOTHED = 50  # commits whose mean is a point of a curve, as in `Progress`
_LONGEST_PAUSE = 60.0  # seconds; a longer time between two commits counts as this: the server was probably down


class History:
    """Appends to a CSV file. Lines wait in memory until `flush` or `close` writes them. Both may wait for the disk, so call
    them in a thread. A commit that the rule discarded has `discarded` 1, and the version of the commit before it.

    Args:
        path: The file. Lines from `next_ticket` on are left over from a crash, and are removed first.
        next_ticket: Ticket of the run's next commit.
        wall: Returns Unix seconds.
        logger: Reports lines that could not be written. Training continues without them.

    Raises:
        OSError: The file can't be written, or the path is not a file.

    Attributes:
        earlier: The curves of the commits that a resumed run already has.
    """

    def __init__(self, path: Path, next_ticket: int, wall: Callable[[], float], logger: Logger) -> None:
        self._wall = wall
        self._logger = logger
        self._path = path
        self._failing = False
        self._lines: deque[tuple[object, ...]] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._lines_before(next_ticket) if next_ticket > 1 and path.exists() else []
        self.earlier = curves(kept)
        if not kept and path.exists():
            path.replace(path.with_name(path.name + ".old"))
        rewritten = path.with_name(path.name + ".new")
        self._file = rewritten.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        try:
            self._writer.writerow(COLUMNS)
            self._writer.writerows(kept)
            self._file.flush()
            rewritten.replace(path)
        except BaseException:
            with suppress(OSError):  # the disk may refuse the buffered lines again
                self._file.close()
            raise

    def _lines_before(self, next_ticket: int) -> list[list[str]]:
        """The file's complete lines of commits before a ticket; none if the file is damaged."""
        try:
            return _lines_before(self._path, next_ticket)
        except (ValueError, csv.Error) as error:
            self._logger.warning(
                "the history file is damaged: renamed to *.old; starting a new one",
                path=str(self._path),
                why=str(error),
            )
            return []

    def applied(self, applied: Applied, timing: Timing) -> None:
        pi = applied.pi
        facts = (pi.median, pi.zero_ratio, pi.max_ratio, pi.proxy_energy, pi.central_energy) if pi else ("",) * 5
        loss = "" if applied.loss is None else applied.loss
        start = (applied.version, applied.ticket, f"{self._wall():.6f}", applied.worker, applied.sequence)
        self._lines.append((*start, int(applied.discarded), applied.staleness, loss, applied.samples, *facts))

    def flush(self) -> None:
        with self._lock:
            self._try(self._write)

    def close(self) -> None:
        self.flush()
        with self._lock:
            self._try(self._file.close)

    def _write(self) -> None:
        while self._lines:
            self._writer.writerow(self._lines.popleft())
        self._file.flush()

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._logger.error(
                    "can't write the history file; lines are missing from here on", path=str(self._path), why=str(error)
                )
            self._failing = True


def open_history(path: Path, next_ticket: int, wall: Callable[[], float], logger: Logger) -> History | None:
    """Opens the history. If it can't be written, logs a warning and returns None. Arguments as for `History`."""
    try:
        return History(path, next_ticket, wall, logger)
    except OSError as error:
        logger.warning("can't write the history file; continuing without it: check --history", path=str(path), why=str(error))
        return None


def _lines_before(path: Path, next_ticket: int) -> list[list[str]]:
    """The file's complete lines of commits before a ticket. Raises ValueError or csv.Error if it is not a history."""
    with path.open(newline="", encoding="utf-8") as file:
        whole = [line for line in iter(lambda: file.readline(_LONGEST_LINE), "") if _is_whole(line)]
    rows = [row for row in csv.reader(whole) if len(row) == len(COLUMNS) and row != list(COLUMNS)]
    return [row for row in rows if int(row[_TICKET]) < next_ticket]


def _is_whole(line: str) -> bool:
    """Whether a line ends with a newline; a crash may cut the last one short. Raises ValueError if it is too long, or has NUL
    bytes."""
    whole = line.endswith("\n")
    if len(line) >= _LONGEST_LINE or (whole and "\0" in line):
        raise ValueError("a line is too long, or has NUL bytes")
    return whole


def curves(rows: Sequence[Sequence[str]]) -> list[Point]:
    """At most `MAX_POINTS`/2 points, evenly spaced in time, of the commits in a history's lines. Each has the means of the last
    50 commits before it. What is not a number counts as unknown."""
    if not rows:
        return []
    times = np.array([_number(row[COLUMNS.index("unix_seconds")]) for row in rows])
    passed = np.clip(np.nan_to_num(np.diff(times, prepend=times[0])), 0, _LONGEST_PAUSE).cumsum()
    moments = np.linspace(0, passed[-1], MAX_POINTS // 2)
    ends = np.unique(np.searchsorted(passed, moments, side="right") - 1)
    return [_point(rows, passed, int(end)) for end in ends]


def _point(rows: Sequence[Sequence[str]], passed: Any, end: int) -> Point:
    begin = max(0, end + 1 - _SMOOTHED)
    window = rows[begin : end + 1]
    version, before = (int(_number(row[COLUMNS.index("version")], 0)) for row in (window[-1], window[0]))
    span = float(passed[end] - passed[begin])
    return Point(
        seconds=float(passed[end]),
        version=version,
        commits_per_second=(version - before) / span if span > 0 else None,
        loss=_mean(window, "loss"),
        pi_median=_mean(window, "pi_median"),
        staleness=_mean(window, "staleness"),
    )


def _mean(rows: Sequence[Sequence[str]], column: str) -> float | None:
    """The mean of a column's finite numbers; None if it has none."""
    values = [_number(row[COLUMNS.index(column)]) for row in rows]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _number(text: str, otherwise: float = math.nan) -> float:
    try:
        number = float(text)
    except ValueError:
        return otherwise
    return number if math.isfinite(number) else otherwise
