"""The core for one parameter under downpour, written without a thought for speed or memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from gem_api.errors import InvalidRequest, LeaseEnded, NotInitialized, SequenceGap
from gem_server.core.values import Admission


@dataclass
class DumbLease:
    worker: str
    expires: float
    starting: bool = True  # no sign of life yet
    sequence: int = 0
    last_applied: tuple[int, int, int] | None = None  # version, base version, staleness
    base: int = 0
    queued: tuple[int, int, float] | None = None  # sequence, base, gradient


@dataclass
class Dumb:
    """The core for one parameter under downpour, written without a thought for speed or memory."""

    theta: float = 0.0
    version: int = 0
    next_id: int = 1
    leases: dict[str, DumbLease] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    initialized: bool = False

    def register(self, worker: str, now: float) -> str:
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease.worker == worker]:
            del self.leases[lease_id]
        lease_id, self.next_id = f"lease-{self.next_id}", self.next_id + 1
        self.leases[lease_id] = DumbLease(worker, now + 10)
        return lease_id

    def initializer(self) -> str | None:
        """The oldest worker that has been there since the last one died: with one rule, always the oldest."""
        return next(iter(self.leases), None) if not self.initialized else None

    def expire(self, now: float) -> list[str]:
        def due(lease_id: str, lease: DumbLease) -> float:
            return lease.expires + (20 if lease.starting and lease_id != self.initializer() else 0)

        gone = [lease_id for lease_id, lease in self.leases.items() if due(lease_id, lease) <= now and not lease.queued]
        for lease_id in gone:
            del self.leases[lease_id]
        return gone

    def offer(self, lease_id: str, sequence: int, base: int, gradient: float, now: float) -> object:
        """What the core should say to a commit: an error's class, or the admission."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return LeaseEnded
        lease.expires, lease.starting = now + 10, False
        if not self.initialized:
            return NotInitialized
        if lease.queued and sequence == lease.queued[0]:
            return Admission.QUEUED
        if sequence == lease.sequence and lease.last_applied:
            return Admission.REPEATED
        if lease.queued or sequence != lease.sequence + 1:
            return SequenceGap
        if base > self.version:
            return InvalidRequest
        lease.queued = sequence, base, gradient
        self.queue.append(lease_id)
        return Admission.FRESH

    def turn(self, now: float) -> object:
        """The oldest ticket's turn: the facts of its commit, or LeaseEnded."""
        lease = self.leases.get(self.queue.pop(0))
        if lease is None:
            return LeaseEnded
        assert lease.queued is not None
        lease.sequence, base, gradient = lease.queued
        staleness = self.version - base
        self.theta -= 0.5 * gradient
        self.version += 1
        lease.last_applied, lease.base, lease.queued = (self.version, self.version, staleness), self.version, None
        lease.expires = now + 10
        self.steps[lease.worker] = self.steps.get(lease.worker, 0) + 1
        return lease.last_applied
