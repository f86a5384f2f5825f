"""What the log holds: one record for each thing that changes a run, in the order in which the core did it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from gem_server.durability.schema import BIG, COUNT, REAL, Form, Maybe, require
from gem_server.durability.state_form import SETTINGS
from gem_server.durability.storage import Bytes


class Kind(StrEnum):
    """What happened."""

    BEGAN = "began"  # a life of the server: all settings
    OPENED = "opened"  # a lease: lease, worker, overlap, owner
    ENDED = "ended"  # a lease: lease, reason
    PULLED = "pulled"  # a worker read θ under its lease: lease, version
    # A commit's turn came: ticket, lease, sequence, base_version, version, dtype, loss, samples, norm; its gradient.
    COMMITTED = "committed"
    DEALT = "dealt"  # a worker asked for a shard: lease, samples, holding
    COMPLETED = "completed"  # a shard: lease, shard


_FORMS: dict[Kind, Form] = {
    Kind.BEGAN: SETTINGS,
    Kind.OPENED: {"lease": str, "worker": str, "overlap": bool, "owner": str},
    Kind.ENDED: {"lease": str, "reason": str},
    Kind.PULLED: {"lease": str, "version": COUNT},
    Kind.COMMITTED: {
        "ticket": COUNT, "lease": str, "sequence": COUNT, "base_version": COUNT, "version": COUNT, "dtype": COUNT,
        "loss": Maybe(REAL), "samples": COUNT, "norm": Maybe(REAL),
    },
    Kind.DEALT: {"lease": str, "samples": BIG, "holding": [BIG]},
    Kind.COMPLETED: {"lease": str, "shard": BIG},
}  # fmt: skip


class Record(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: What it is.
        fields: JSON values, named at `Kind`.
        payload: A commit's gradient as it arrived; these bytes stay as they are until the record is on the disk.
    """

    kind: Kind
    fields: dict[str, Any]
    payload: Sequence[Bytes] = ()

    def text(self) -> bytes:
        """Kind and fields as JSON."""
        return json.dumps([self.kind, self.fields], separators=(",", ":")).encode()


def from_text(text: bytes | memoryview, payload: memoryview) -> Record:
    """The inverse of `Record.text`. Raises ValueError for what is none."""
    try:
        kind, fields = json.loads(bytes(text))
    except RecursionError:
        raise ValueError("its text is nested too deeply") from None
    require(fields, _FORMS[Kind(kind)], kind)
    return Record(Kind(kind), fields, (payload,))


Recorder = Callable[[Record], int]


def forget(record: Record) -> int:
    """Records nothing: what a server does that keeps no log."""
    return 0
