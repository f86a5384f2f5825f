"""The file of the write-ahead log that is being written: the newest segment."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from gem_server.durability.segment import SegmentWriter
from gem_server.durability.storage import Storage
from gem_server.durability.write_order import Group


class LogFile:
    """Writes groups of records, each to its segment. All methods raise OSError. `new_seed` returns 32 random bits."""

    def __init__(self, storage: Storage, directory: Path, new_seed: Callable[[], int] = lambda: secrets.randbits(32)) -> None:
        self._storage = storage
        self._directory = directory
        self._new_seed = new_seed
        self._segment: SegmentWriter | None = None

    def write(self, group: Group) -> None:
        """Writes a group, to a new segment if it does not belong to the last one. After an OSError, write it again."""
        if self._segment is None or self._segment.serial != group.serial:
            self.close()
            first = group.records[0].number
            self._segment = SegmentWriter(
                self._storage, self._directory, group.serial, first, self._new_seed(), group.run_id
            )  # fmt: skip
        self._segment.write([(waiting.number, waiting.record) for waiting in group.records], group.durable)

    def sync(self) -> None:
        """Returns once everything written to the segment is on the disk. After an OSError it is unknown what is there."""
        if self._segment is not None:
            self._segment.sync()

    def free(self) -> int:
        """Bytes that are free on the log's disk."""
        return self._storage.free(self._directory)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
