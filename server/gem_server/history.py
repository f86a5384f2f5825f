"""The run's history: a line of CSV for each commit, applied or left out by the rule, for plots and for auditing tickets."""

from __future__ import annotations

import csv
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gem_api.logs import Logger

from gem_server.apply_loop import Timing
from gem_server.facts import Applied

COLUMNS = (
    "version", "ticket", "unix_seconds", "worker", "sequence", "discarded", "staleness", "loss", "samples",
    "pi_median", "pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy",
)  # fmt: skip
MAX_WAITING = 1 << 20  # lines in memory while the disk does not take them; the oldest go then
_TICKET = COLUMNS.index("ticket")


class History:
    """Appends to a CSV file. Lines wait in memory, and reach the file at `flush` and `close`, which may wait for the disk: call
    them in a thread. A commit that the rule left out has 1 under `discarded`, and the version of the one before it.

    Args:
        path: The file. Lines from `next_ticket` on, which a crash left behind, are taken out first.
        next_ticket: Ticket of the run's next commit.
        wall: Unix seconds.
        log: Told when a line could not be written. Training goes on: the history is an aid, not a promise.
    """

    def __init__(self, path: Path, next_ticket: int, wall: Callable[[], float], log: Logger) -> None:
        self._wall = wall
        self._log = log
        self._path = path
        self._failing = False
        self._lines: deque[tuple[object, ...]] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        kept = _lines_before(path, next_ticket) if next_ticket > 1 and path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        if not kept and path.exists():
            path.replace(path.with_name(path.name + ".old"))
        rewritten = path.with_name(path.name + ".new")
        self._file = rewritten.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)
        self._writer.writerows(kept)
        self._file.flush()
        rewritten.replace(path)

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
                self._log.error(
                    "the history can't be written; lines are missing from here", path=str(self._path), why=str(error)
                )
            self._failing = True


def _lines_before(path: Path, next_ticket: int) -> list[list[str]]:
    """The file's whole lines of commits before a ticket."""
    with path.open(newline="", encoding="utf-8") as file:
        whole = [line for line in file if line.endswith("\n")]
    rows = [row for row in csv.reader(whole) if len(row) == len(COLUMNS) and row[_TICKET].isdigit()]
    return [row for row in rows if int(row[_TICKET]) < next_ticket]
