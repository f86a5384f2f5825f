"""The write-ahead log as it is written: records wait in order, and reach the disk in groups.

Events are appended at once, in the core's order; that waits for nothing. A group is written and synced while the next one
collects. The steps, in order:

- `take` a group on the thread that appends; `write` it on another thread; then report it as `written`.
- `sync` on any thread; then report everything written before that as `done`.

Before a client is told of an event, `durable` must have reached the value that `appended` had after it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from gem_server.core.records import Record
from gem_server.durability.segment import SegmentWriter
from gem_server.durability.storage import Storage

_RECORD_BYTES = 256  # approximate size of a record without its payload


class Waiting(NamedTuple):
    """A record that is not on the disk yet.

    Attributes:
        serial: The serial number of the segment that it belongs to.
        number: Its number in the log.
        record: The record.
    """

    serial: int
    number: int
    record: Record


class LogPosition(NamedTuple):
    """Where the log after a checkpoint begins.

    Attributes:
        serial: The serial number of its first segment.
        number: The number of the last record before it.
    """

    serial: int
    number: int


class Stall(NamedTuple):
    """Why no commit can be acknowledged at present.

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
        storage: The file operations to write it with.
        directory: The log's folder.
        run_id: The run's id.
        serial: Serial number of the first segment to write.
        number: Number of the last record before that segment.
        new_seed: Returns 32 random bits.

    Attributes:
        appended: Number of the last record appended.
        durable: Number of the last record on the disk.
        serial: Serial number of the segment that the next record goes to.
        size: Approximate bytes since the last cut.
        run_id: The run's id, for the next segment.
        stall: Why no commit can be acknowledged at present; None if all is well.
    """

    def __init__(
        self,
        storage: Storage,
        directory: Path,
        run_id: str,
        serial: int = 1,
        number: int = 0,
        new_seed: Callable[[], int] = lambda: secrets.randbits(32),
    ) -> None:
        self._storage = storage
        self._directory = directory
        self.run_id = run_id
        self._new_seed = new_seed
        self._waiting: deque[Waiting] = deque()
        self._segment: SegmentWriter | None = None
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

    def begins_segment(self, batch: list[Waiting]) -> bool:
        """Whether a batch begins a new segment. If so, everything before it must be `done` first. Otherwise a crash might keep
        the new segment and lose records that precede it."""
        return self._segment is None or self._segment.serial != batch[0].serial

    def write(self, batch: list[Waiting]) -> None:
        """Writes a batch. After an OSError, write the whole batch again."""
        if self.begins_segment(batch):
            self.close()
            serial, first = batch[0].serial, batch[0].number
            self._segment = SegmentWriter(self._storage, self._directory, serial, first, self._new_seed(), self.run_id)
        assert self._segment is not None
        self._segment.write([(waiting.number, waiting.record) for waiting in batch], self.durable)

    def written(self, batch: list[Waiting]) -> None:
        """Reports that a batch has been written."""
        for _ in batch:
            self._waiting.popleft().record.written()

    def sync(self) -> None:
        """Returns once everything written is on the disk. After an OSError it is unknown what is there."""
        if self._segment is not None:
            self._segment.sync()

    def done(self, number: int) -> None:
        """Reports that all records up to `number` are on the disk."""
        self.durable = number

    def free(self) -> int:
        """Bytes that are free on the log's disk."""
        return self._storage.free(self._directory)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
