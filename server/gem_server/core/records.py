"""Records: one for each event that changes a run, in the core's order. The write-ahead log is a sequence of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from gem_api.framing import Bytes


class Kind(StrEnum):
    """The kinds of events, and the fields of each record."""

    BEGAN = "began"  # the server started: all hyper-parameters
    OPENED = "opened"  # a lease began: lease, worker, overlap, owner
    ENDED = "ended"  # a lease ended: lease, reason
    PULLED = "pulled"  # a worker read θ under its lease: lease, version
    # A commit reached the head of the queue: ticket, lease, sequence, base_version, version, dtype, loss, samples, norm,
    # weight; its payload is the gradient.
    COMMITTED = "committed"
    # Replies that were held are made: leases, each with its ratio; source, the lease of the last commit, or empty; version.
    RELEASED = "released"
    DEALT = "dealt"  # a worker got a shard, or none: lease, samples, holding
    COMPLETED = "completed"  # a worker completed a shard: lease, shard


def _nothing() -> None: ...


class Record(NamedTuple):
    """One event.

    Attributes:
        kind: What happened.
        fields: JSON values, by the names listed at `Kind`.
        payload: A commit's gradient in its wire format. These bytes must not change until the record is written.
        written: Call this then, or if the record is dropped.
    """

    kind: Kind
    fields: dict[str, Any]
    payload: Sequence[Bytes] = ()
    written: Callable[[], None] = _nothing


Recorder = Callable[[Record], int]
"""Takes the next record and returns its number in the log."""


def discard_record(record: Record) -> int:
    """The recorder of a server that keeps no log: drops the record."""
    record.written()
    return 0
