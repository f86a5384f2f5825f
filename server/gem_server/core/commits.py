"""A commit on its way through the core: arrived, with a ticket, and when its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gem_api.framing import bytes_of
from gem_api.layout import Vector
from gem_api.wire import FLOAT32

from gem_server.core.facts import Header
from gem_server.core.leases import Lease
from gem_server.durability.storage import Bytes
from gem_server.rules import PiFacts, RuleInput


class Arrived(NamedTuple):
    """A gradient as it arrived: its wire dtype and its bytes, which stay as they are until they are in the log."""

    dtype: int
    pieces: Sequence[Bytes]


def as_floats(gradient: Vector) -> Arrived:
    """A gradient (float32, shape (P,)) that arrived as it is."""
    return Arrived(FLOAT32.dtype, (bytes_of(gradient),))


@dataclass(frozen=True)
class Commit:
    """A commit whose gradient is complete: it holds a ticket and waits for its turn."""

    ticket: int
    lease: Lease
    header: Header
    gradient: Vector
    arrived: Arrived
    norm: float | None


@dataclass(frozen=True)
class Step:
    """The arithmetic of one commit, ready to run; `run` returns the facts about π. One that is not `accepted` moves nothing."""

    commit: Commit
    rule_input: RuleInput
    accepted: bool
    run: Callable[[], PiFacts | None]
