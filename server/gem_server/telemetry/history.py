"""The history file: a line of CSV for each commit that was applied, or discarded by the rule. For plots and audits."""

from __future__ import annotations

import csv
import io
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import compress
from pathlib import Path

import numpy as np
from gem_api.history import COLUMNS, HistoryError, read_history, written_name
from gem_api.process.logs import Logger
from gem_api.timeline import Timeline

from gem_server.commit_times import CommitTimes
from gem_server.core.values import Applied
from gem_server.telemetry.evaluation_file import EvaluationFile

MAX_WAITING = 1 << 20  # lines kept in memory while the disk fails; beyond that the oldest are dropped
_BATCH = 1 << 12  # lines written at a time


class History:
    """Appends to a CSV file. Lines wait in memory until `flush` or `close` writes them. Both may wait for the disk, so call
    them in a thread. A commit that the rule discarded has `discarded` 1, and the version of the commit before it.

    Args:
        path: The file. Lines from `next_ticket` on are left over from a crash, and are removed first.
        next_ticket: Ticket of the run's next commit.
        resumed: Whether the run goes on from a checkpoint; else the file is another run's.
        wall: Returns Unix seconds.
        logger: Reports lines that could not be written. Training continues without them.

    Raises:
        OSError: The file can't be written, or the path is not a file.

    Attributes:
        earlier: The curves of the commits that a resumed run already has.
        evaluations: The file of the evaluations, which is written with the lines.
    """

    def __init__(self, path: Path, next_ticket: int, wall: Callable[[], float], logger: Logger, resumed: bool) -> None:
        self._wall = wall
        self._logger = logger
        self._path = path
        self._failing = False
        self._lines: deque[tuple[object, ...]] = deque(maxlen=MAX_WAITING)
        self._batch: list[tuple[object, ...]] = []  # lines that are being written
        self._dropped = self._told = 0  # lines that had no room in memory, and how many of them the log has told of
        self._lock = threading.Lock()
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        rewritten = path.with_name(path.name + ".new")
        self._file = rewritten.open("w", newline="", encoding="utf-8")
        self.earlier = Timeline()
        self._newest = math.inf  # version of the last commit that a resumed run has, as far as the file tells
        try:
            csv.writer(self._file).writerow(COLUMNS)
            whole = resumed and path.exists() and self._copy_lines_before(next_ticket)
            self._file.flush()
            self._end = os.fstat(self._file.fileno()).st_size  # of the lines that are whole
            if not whole and path.exists():
                path.replace(path.with_name(path.name + ".old"))
            rewritten.replace(path)
        except BaseException:
            with suppress(OSError):  # the disk may refuse the buffered lines again
                self._file.close()
            raise
        self.evaluations = EvaluationFile(path, self._newest if resumed else None)
        for each in self.evaluations.known:
            self.earlier.evaluated(each.version, each.loss, each.accuracy)

    def _copy_lines_before(self, next_ticket: int) -> bool:
        """Copies the lines of commits before a ticket. Returns whether the old file is of no more use: it has lines of this
        run, and no damaged ones."""
        kept = damaged = 0
        why, gone, first, last = "", 0, math.inf, 0.0  # how many commits are gone, and their versions
        try:
            for piece in read_history(self._path):
                if piece.names != list(COLUMNS):
                    raise HistoryError(f"it has other columns: {', '.join(piece.names)[:200]}")
                tickets = piece.columns["ticket"]
                before = tickets < next_ticket
                self._file.writelines(compress(piece.lines, before))
                self.earlier.replay({name: column[before] for name, column in piece.columns.items()})
                if before.any():
                    self._newest = float(piece.columns["version"][before].max())
                kept += int(before.sum())
                lost = piece.columns["version"][np.isfinite(tickets) & ~before]
                gone, first, last = gone + len(lost), lost.min(initial=first), lost.max(initial=last)
                damaged += piece.damaged + int((~np.isfinite(tickets)).sum())
        except HistoryError as error:
            why = str(error)
        if why or damaged:
            self._logger.warning(
                "the history file is damaged: what can't be read is left out; the file as it was is renamed to *.old",
                path=str(self._path),
                why=why or f"{damaged} of its lines can't be read",
            )
        if not kept and gone:
            self._newest = 0.0
        if gone:
            self._logger.warning(
                "the history had commits that the crash has taken (it may lack the last); their lines are removed",
                commits=gone, versions=f"{first:.0f} to {last:.0f}",
            )  # fmt: skip
        return bool(kept or gone) and not damaged and not why

    def applied(self, applied: Applied, times: CommitTimes) -> None:
        pi = applied.pi
        facts = (pi.median, pi.zero_ratio, pi.max_ratio, pi.proxy_energy, pi.central_energy) if pi else ("",) * 5
        loss = "" if applied.loss is None else applied.loss
        self._dropped += len(self._lines) == MAX_WAITING
        start = (applied.version, applied.ticket, f"{self._wall():.6f}", written_name(applied.worker), applied.sequence)
        self._lines.append((*start, int(applied.discarded), applied.staleness, loss, applied.samples, *facts))

    def flush(self) -> None:
        with self._lock:
            try:
                self._write()
                self.evaluations.flush()
            except OSError as error:
                if not self._failing:
                    self._logger.error(
                        "can't write the history file; its lines are kept and written once it can be",
                        path=str(self._path),
                        why=str(error),
                    )
                self._failing = True
            else:
                self._report_recovery()

    def close(self) -> None:
        self.flush()
        with self._lock:
            if missing := len(self._batch) + len(self._lines):
                self._logger.error("the history file lacks its last lines", path=str(self._path), why=f"{missing} lines")
            with suppress(OSError):
                self._file.close()

    def _write(self) -> None:
        while self._batch or self._lines:
            while self._lines and len(self._batch) < _BATCH:
                self._batch.append(self._lines.popleft())
            self._append(_as_csv(self._batch))
            self._batch.clear()

    def _append(self, lines: bytes) -> None:
        """Appends whole lines or, after an OSError, nothing."""
        descriptor, at = self._file.fileno(), self._end
        try:
            while lines:
                written = os.pwrite(descriptor, lines, at)
                at, lines = at + written, lines[written:]
        except OSError:
            with suppress(OSError):  # the next attempt writes over what is left
                os.ftruncate(descriptor, self._end)
            raise
        self._end = at

    def _report_recovery(self) -> None:
        if self._failing:
            self._logger.info("the history file can be written again", path=str(self._path))
        self._failing = False
        if dropped := self._dropped - self._told:
            self._told += dropped
            self._logger.warning(
                "the history file lacks lines: memory had no room for them", path=str(self._path), why=f"{dropped} lines"
            )


def open_history(path: Path, next_ticket: int, wall: Callable[[], float], logger: Logger, resumed: bool) -> History | None:
    """Opens the history. If it can't be written, logs a warning and returns None. Arguments as for `History`."""
    try:
        return History(path, next_ticket, wall, logger, resumed)
    except OSError as error:
        logger.warning("can't write the history file; continuing without it: check --history", path=str(path), why=str(error))
        return None


def _as_csv(lines: Iterable[tuple[object, ...]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    return text.getvalue().encode()
