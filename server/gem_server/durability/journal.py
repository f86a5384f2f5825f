"""The log being written: records wait in order, and reach the disk in groups.

What happens is appended at once, in the order in which the core did it, and nobody waits for that. A group is written, and
then synced, while the next one gathers: `take` it on the thread that appends, `write` it on another, say that it is `written`;
`sync` on any thread, then say that what was written before that is `done`. Whoever tells a client of something waits until
`durable` has reached what was `appended` by then.
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

_RECORD_BYTES = 256  # about what a record takes beside its payload


class Waiting(NamedTuple):
    """A record that is not on the disk yet, and the segment that it belongs to."""

    serial: int
    number: int
    record: Record


class LogPosition(NamedTuple):
    """Where a checkpoint's log begins: a segment, and the number of the last record before it."""

    serial: int
    number: int


class Journal:
    """The log of one run.

    Args:
        storage: Where it is written.
        directory: Its folder.
        run_id: The run's.
        serial: The first segment to be written.
        number: Number of the last record before these.
        new_seed: 32 random bits.

    Attributes:
        appended: Number of the last record.
        durable: Number of the last one on the disk.
        serial: The segment that the next one goes to.
        size: Bytes since the last cut, about.
        trouble: Why nothing can be acknowledged now; empty if all is well.
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
        self._run_id = run_id
        self._new_seed = new_seed
        self._waiting: deque[Waiting] = deque()
        self._segment: SegmentWriter | None = None
        self.appended = self.durable = number
        self.serial = serial
        self.size = 0
        self.trouble = ""
        self._cut_at = number

    def append(self, record: Record) -> int:
        """Takes a record in; returns its number. Its payload must stay as it is until it is durable."""
        self.appended += 1
        self.size += _RECORD_BYTES + sum(map(len, record.payload))
        self._waiting.append(Waiting(self.serial, self.appended, record))
        return self.appended

    def cut(self) -> LogPosition:
        """What is appended from now on goes to a new segment: a checkpoint holds all before."""
        self.serial += self.appended > self._cut_at
        self._cut_at, self.size = self.appended, 0
        return LogPosition(self.serial, self.appended)

    def take(self) -> list[Waiting]:
        """What waits to be written, of one segment."""
        return list(takewhile(lambda waiting: waiting.serial == self._waiting[0].serial, self._waiting))

    def begins_segment(self, batch: list[Waiting]) -> bool:
        """Whether a batch goes to a new segment. Then everything before it must be done first: else a crash might leave it
        without what precedes it."""
        return self._segment is None or self._segment.serial != batch[0].serial

    def write(self, batch: list[Waiting]) -> None:
        """Writes a batch. After an OSError it is to be written again, whole."""
        if self.begins_segment(batch):
            self.close()
            serial, first = batch[0].serial, batch[0].number
            self._segment = SegmentWriter(self._storage, self._directory, serial, first, self._new_seed(), self._run_id)
        assert self._segment is not None
        self._segment.write([(waiting.number, waiting.record) for waiting in batch], self.durable)

    def written(self, batch: list[Waiting]) -> None:
        """A batch is written."""
        for _ in batch:
            self._waiting.popleft()

    def sync(self) -> None:
        """Returns once everything written is on the disk. Raises OSError: what is there can't be told then."""
        if self._segment is not None:
            self._segment.sync()

    def done(self, number: int) -> None:
        """Everything up to a record is on the disk."""
        self.durable = number

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
