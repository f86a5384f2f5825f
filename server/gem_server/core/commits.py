"""The stages of a commit in the core: as it arrived, with a ticket, and ready to be applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gem_api.framing import Bytes, bytes_of
from gem_api.layout import Vector
from gem_api.wire import FLOAT32

from gem_server.core.leases import Lease
from gem_server.core.records import Kind, Record
from gem_server.core.uploads import Upload
from gem_server.core.values import Header
from gem_server.rules import PiStatistics, RuleInput


class Arrived(NamedTuple):
    """A gradient in its wire format: its dtype and its bytes, which must not change until they are in the log."""

    dtype: int
    pieces: Sequence[Bytes]


def as_floats(gradient: Vector) -> Arrived:
    """A gradient (float32, shape (P,)) that was sent as float32."""
    return Arrived(FLOAT32.dtype, (bytes_of(gradient),))


class Commit(NamedTuple):
    """A commit whose gradient is complete: it holds a ticket and waits in the FIFO. It counts `weight` of a whole batch."""

    ticket: int
    lease: Lease
    header: Header
    upload: Upload
    arrived: Arrived
    norm: float | None
    weight: float = 1.0

    @property
    def gradient(self) -> Vector:
        """float32, shape (P,)."""
        return self.upload.gradient

    def record(self, version: int) -> Record:
        """Its record in the log; `version` is the central variable's after it. If the log gets the memory where the gradient
        arrived, that is not free until the record is written."""
        held = self.arrived.dtype == FLOAT32.dtype
        if held:
            self.upload.hold()
        fields = {
            "ticket": self.ticket,
            "lease": self.header.lease_id,
            "sequence": self.header.sequence,
            "base_version": self.header.base_version,
            "version": version,
            "dtype": self.arrived.dtype,
            "loss": self.header.loss,
            "samples": self.header.samples,
            "norm": self.norm,
            "weight": self.weight,
        }
        return Record(Kind.COMMITTED, fields, self.arrived.pieces, *([self.upload.release] if held else []))


class Step(NamedTuple):
    """The arithmetic of one commit, ready to run.

    Attributes:
        commit: The commit.
        rule_input: What the rule gets besides the arrays.
        accepted: Whether the rule applies the commit; otherwise θ stays as it is.
        run: Does the arithmetic and returns the facts about π.
    """

    commit: Commit
    rule_input: RuleInput
    accepted: bool
    run: Callable[[], PiStatistics | None]
