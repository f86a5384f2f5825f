"""The values that the core takes and returns, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.update_kind import UpdateKind

from gem_server.rules import PiStatistics


class EndReason(StrEnum):
    """The reason why a lease ended. The names are those of the contract's LeaseEndReason."""

    LEFT = "left"
    EXPIRED = "expired"
    ROLLED_BACK = "rolled_back"
    REPLACED = "replaced"
    QUARANTINED = "quarantined"
    STALLED = "stalled"


class Outcome(StrEnum):
    """The outcome of a commit."""

    APPLIED = "applied"
    REPEATED = "repeated"
    REJECTED = "rejected"
    DISCARDED = "discarded"  # by the rule, as too stale


class Admission(StrEnum):
    """The decision on a commit whose header has arrived."""

    FRESH = "fresh"  # receive its gradient and take a ticket
    QUEUED = "queued"  # it already holds a ticket: wait for its result
    REPEATED = "repeated"  # it was applied: send its result again


class PullDecision(StrEnum):
    """The decision on a worker that asks for θ."""

    READY = "ready"
    WAIT = "wait"
    INITIALIZE = "initialize"


@dataclass(frozen=True)
class Header:
    """The header of a commit: what a worker sends ahead of the gradient.

    Attributes:
        lease_id: The worker's lease.
        sequence: The commit's number within the lease, from 1.
        base_version: Version of θ that the gradient was computed on.
        fingerprint: SHA-256 of the layout.
        loss: Training loss on the batch, if reported.
        samples: Samples in the batch.
        kind: Whether the commit holds a gradient or a delta.
        share: The share of the worker's whole batch that it was computed on; 0: the worker names none.
    """

    lease_id: str
    sequence: int
    base_version: int
    fingerprint: bytes
    loss: float | None
    samples: int
    kind: UpdateKind = "gradient"
    share: float = 0.0


@dataclass(frozen=True)
class Applied:
    """A commit that was applied, or discarded by the rule.

    Attributes:
        ticket: Its number in the FIFO.
        worker: The worker's name.
        sequence: Its number within the lease.
        version: The central variable's version right after it.
        base_version: Version of the θ that the worker gets in reply and computes its next gradient on.
        staleness: τ, commits applied between the worker's pull and this commit (Eq. 2).
        loss: Training loss on the batch, if reported.
        samples: Samples in the batch.
        pi: Facts about π; None for a rule without one, and for a commit restored from a checkpoint.
        scale: Factor by which the rule multiplied Δ of a whole batch, averaged over the parameters.
        discarded: Whether the rule discarded it as too stale; `version` then stays as it was.
    """

    ticket: int
    worker: str
    sequence: int
    version: int
    base_version: int
    staleness: int
    loss: float | None
    samples: int
    pi: PiStatistics | None
    scale: float = 1.0
    discarded: bool = False


@dataclass(frozen=True)
class Awaited:
    """The workers that a new run waits for before its first shard is dealt.

    Attributes:
        min_workers: Workers that must be in the run at the same time.
        seconds: Seconds until others have had their time to join, if nobody joins until then.
        at_most: The same, however many join.
    """

    min_workers: int
    seconds: float
    at_most: float


@dataclass(frozen=True)
class Ended:
    """A lease that ended, and why."""

    lease_id: str
    worker: str
    reason: EndReason
    shards_returned: int


@dataclass(frozen=True)
class LeaderRegistration:
    """A worker's registration with the server that leads, as it shows it to the server of another range.

    Attributes:
        lease_id: The lease there: this range opens one under the same id.
        run_id: The run there.
        settings: The run's hyper-parameters there.
    """

    lease_id: str
    run_id: str
    settings: Hyperparameters


@dataclass(frozen=True)
class Registration:
    """A worker that joined.

    Attributes:
        lease_id: Its lease.
        layout: The run's layout.
        must_initialize: Whether this worker must give θ its first value.
        steps_done: Commits already applied under its name in this run.
        ended: The lease that it replaces, if a worker of its name still held one.
    """

    lease_id: str
    layout: Layout
    must_initialize: bool
    steps_done: int
    ended: Ended | None
