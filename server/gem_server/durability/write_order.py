"""The order of the write-ahead log: what may be written now, what is acknowledged, who waits. Decisions without threads, files
or a clock, in the style of `Ready` and `Advance` of etcd's raft. `GroupCommit` carries them out, and so does the simulation.

The steps of a group of records:

- `ready` gives the next group, unless there is none or it has to wait. Write it, and report it as `written`. If that was not
  possible, ask again: one group at a time.
- Sync it. Meanwhile the next group may be written.
- Once it is synced and `is_next`, `acknowledge` it.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from gem_server.durability.journal import Journal, Waiting

W = TypeVar("W")


class Group(NamedTuple):
    """Records that are written together, to one segment.

    Attributes:
        place: Its place among the groups, from 1.
        records: At least one.
        durable: Number of the last record that was on the disk before.
        run_id: The run's id.
    """

    place: int
    records: list[Waiting]
    durable: int
    run_id: str

    @property
    def serial(self) -> int:
        """The serial number of its segment."""
        return self.records[0].serial

    @property
    def last(self) -> int:
        """The number of its last record."""
        return self.records[-1].number


class WriteOrder(Generic[W]):
    """The order in which a journal reaches the disk, and who waits for which record.

    Args:
        journal: The log.

    Attributes:
        based: Whether a checkpoint is complete that the log can follow. It may not be written before.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.based = self._beginning = False
        self._written = self._acknowledged = 0  # groups
        self._serial = 0  # the segment of the last group that was written
        self._waiters: deque[tuple[int, W]] = deque()

    # -- the checkpoint that the log follows

    def begin(self) -> None:
        """Call this when θ has its first value. Only the first checkpoint will have it: until then everybody waits."""
        self._beginning = True

    def base_written(self) -> list[W]:
        """Call this when a checkpoint is complete. Returns who has waited for that alone."""
        if not self.based:
            self.journal.stall = None  # later, only a group that is acknowledged shows that all is well
        self.based, self._beginning = True, False
        return self._released()

    # -- groups

    def ready(self) -> Group | None:
        """The next group to write; None if no record waits, or if it must wait itself."""
        records = self.journal.take() if self.based else []
        if not records or (self._begins_segment(records) and not self._all_acknowledged):
            return None
        return Group(self._written + 1, records, self.journal.durable, self.journal.run_id)

    def _begins_segment(self, records: list[Waiting]) -> bool:
        """Whether records begin a new segment. Everything before must be on the disk first: a crash might keep the new segment
        and lose records that precede it."""
        return records[0].serial != self._serial

    @property
    def _all_acknowledged(self) -> bool:
        return self._acknowledged == self._written

    def written(self, group: Group) -> None:
        """Reports that a group has been written."""
        self._written, self._serial = group.place, group.serial
        self.journal.written(len(group.records))

    def is_next(self, group: Group) -> bool:
        """Whether every group before this one is acknowledged. A later sync that succeeds says nothing about an earlier one
        that failed."""
        return self._acknowledged == group.place - 1

    def acknowledge(self, group: Group) -> list[W]:
        """Reports that a group is on the disk; it must be the next. Returns who waits no longer."""
        self._acknowledged = group.place
        self.journal.durable = group.last
        self.journal.stall = None
        return self._released()

    # -- who waits

    def awaits(self, number: int) -> bool:
        """Whether who needs a record on the disk has to wait for it."""
        return number > self.journal.durable or self._beginning

    def wait(self, number: int, waiter: W) -> None:
        """Adds who waits until a record is on the disk."""
        self._waiters.append((number, waiter))

    def dismiss(self) -> list[W]:
        """Returns all who wait: they are not told of their records."""
        dismissed = [waiter for _, waiter in self._waiters]
        self._waiters.clear()
        return dismissed

    def _released(self) -> list[W]:
        # Not in the order of their numbers: who repeats an older commit waits for its record.
        released = [waiter for number, waiter in self._waiters if number <= self.journal.durable]
        self._waiters = deque(waiting for waiting in self._waiters if waiting[0] > self.journal.durable)
        return released
