"""The records of the write-ahead log that are not on the disk yet, in order. Pure: `log_file.py` writes them.

Events are appended at once, in the core's order; that waits for nothing. Before a client is told of an event, `durable` must
have reached the value that `appended` had after it. `write_order.py` says what may be written when.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import NamedTuple

from gem_server.core.records import Record

_RECORD_BYTES = 256  # approximate size of a record without its payload


class Waiting(NamedTuple):
    """A record that is not on the disk yet, with the serial number of its segment, and its number in the log."""

    serial: int
    number: int
    record: Record


class LogPosition(NamedTuple):
    """The place where a checkpoint's log begins: the serial number of its first segment, and the number of the last record
    before it."""

    serial: int
    number: int


class Stall(NamedTuple):
    """The reason why no commit can be acknowledged at present.

    Attributes:
        why: What is wrong, and what to do.
        since: When it began, in seconds of the server's clock.
        needed: Bytes that the log needs to go on; 0 if that is not known.
        free: Bytes that are free on its disk.
    """

    why: str
    since: float
    needed: int
    free: int


class Journal:
    """The log of one run.

    Args:
        run_id: The run's id.
        serial: Serial number of the first segment to write.
        number: Number of the last record before that segment.

    Attributes:
        appended: Number of the last record appended.
        durable: Number of the last record on the disk.
        serial: Serial number of the segment that the next record goes to.
        size: Approximate bytes since the last cut.
        run_id: The run's id, for the next segment.
        stall: Why no commit can be acknowledged at present; None if all is well.
    """

    def __init__(self, run_id: str, serial: int = 1, number: int = 0) -> None:
        self.run_id = run_id
        self._waiting: deque[Waiting] = deque()
        self.appended = self.durable = number
        self.serial = serial
        self.size = 0
        self.stall: Stall | None = None
        self._cut_at = number

    def append(self, record: Record) -> int:
        """Appends a record and returns its number."""
        self.appended += 1
        self.size += _RECORD_BYTES + sum(map(len, record.payload))
        self._waiting.append(Waiting(self.serial, self.appended, record))
        return self.appended

    def cut(self) -> LogPosition:
        """Starts a new segment for all further records; a checkpoint holds everything before. Returns where it begins."""
        self.serial += self.appended > self._cut_at
        self._cut_at, self.size = self.appended, 0
        return LogPosition(self.serial, self.appended)

    def take(self) -> list[Waiting]:
        """The records that wait to be written, as far as they belong to the same segment."""
        return list(takewhile(lambda waiting: waiting.serial == self._waiting[0].serial, self._waiting))

    def written(self, count: int) -> None:
        """Reports that the first `count` records that wait have been written."""
        for _ in range(count):
            self._waiting.popleft().record.written()
