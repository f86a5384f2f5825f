"""Which commits a server holds back while all ranges of a model prepare a checkpoint together. It uses no clock and no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gem_api.errors import CheckpointFailed

from gem_server.core.leases import Lease, LeaseTable

HOLD_SECONDS = 30.0


class Waiting(Protocol):
    """A commit whose gradient is complete."""

    @property
    def lease(self) -> Lease: ...

    @property
    def sequence(self) -> int: ...


W = TypeVar("W", bound=Waiting)


@dataclass
class _Round:
    """One time of holding commits back.

    Attributes:
        number: Counts the rounds, from 1.
        ends_at: When it ends by itself, in seconds of the caller's clock.
        taken: What `Hold.begin` returned.
        cut: The commits that may pass; None until it is known, and until then none may.
    """

    number: int
    ends_at: float
    taken: dict[str, int]
    cut: dict[str, int] | None = None


class Hold(Generic[W]):
    """Holds back the commits that a checkpoint over all ranges must not have.

    A round goes: `begin`, then `release_up_to` with the cut of all ranges, then `end`. A commit that may not pass is given to
    `keep`; whatever `release_up_to`, `end` and `drop` return has to go on, in that order.

    Attributes:
        waiting: The commits held back, by lease id, in the order of arrival. A lease has at most one.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, W] = {}
        self._round: _Round | None = None
        self._rounds = 0

    @property
    def active(self) -> int:
        """The number of the round in progress; 0 if there is none."""
        return self._round.number if self._round else 0

    @property
    def has_cut(self) -> bool:
        """Whether the round in progress has its cut."""
        return self._round is not None and self._round.cut is not None

    def begin(self, leases: LeaseTable, now: float) -> dict[str, int]:
        """Holds all further commits back. Returns what was taken so far: lease id to the largest sequence that has a ticket.

        Raises:
            CheckpointFailed: A round is in progress. Two would not know of each other's cuts.
        """
        if self._round is not None:
            left = max(0.0, self._round.ends_at - now)
            raise CheckpointFailed(f"a checkpoint over all ranges is in progress: try again, at the latest in {left:.0f} s")
        self._rounds += 1
        taken = {lease.lease_id: sequence for lease in leases.live.values() if (sequence := _taken(lease))}
        self._round = _Round(self._rounds, now + HOLD_SECONDS, taken)
        return dict(taken)

    def holds(self, lease_id: str, sequence: int) -> bool:
        """Whether a commit must wait."""
        if self._round is None:
            return False
        return self._round.cut is None or sequence > self._round.cut.get(lease_id, 0)

    def keep(self, commit: W) -> None:
        """Adds a commit that must wait. It counts as queued: a repeat waits with it, and its lease does not expire."""
        commit.lease.queued = commit.sequence
        self.waiting[commit.lease.lease_id] = commit

    def release_up_to(self, cut: Mapping[str, int]) -> list[W]:
        """Sets the cut. Returns the commits that need not wait any longer.

        Raises:
            CheckpointFailed: No round waits for a cut, or the cut lacks commits that this range has taken.
        """
        if self._round is None or self._round.cut is not None:
            raise CheckpointFailed(
                f"no commits are held back for this cut: begin the checkpoint again (a hold ends after {HOLD_SECONDS:.0f} s)"
            )
        if "" in cut or any(cut.get(lease_id, 0) < sequence for lease_id, sequence in self._round.taken.items()):
            raise CheckpointFailed("the cut lacks commits that this range has taken: begin the checkpoint again")
        self._round.cut = dict(cut)
        return self._take(lambda commit: not self.holds(commit.lease.lease_id, commit.sequence))

    def missing(self, leases: LeaseTable) -> list[Lease]:
        """The leases that have not reached the cut, so that the checkpoint must wait for them.

        A lease has reached it once a commit of that sequence or a later one has come: it has a ticket, waits here or was
        rejected. A worker sends the next commit once all ranges have answered the one before. A lease that has ended is not
        waited for."""
        if self._round is None or self._round.cut is None:
            return []
        live = ((leases.live.get(lease_id), sequence) for lease_id, sequence in self._round.cut.items())
        return [lease for lease, sequence in live if lease is not None and _seen(lease) < sequence]

    def overdue(self, now: float) -> bool:
        """Whether the round's time is up."""
        return self._round is not None and self._round.ends_at <= now

    def end(self, number: int) -> list[W]:
        """Ends a round, unless that has happened. Returns the commits that waited."""
        if self._round is None or self._round.number != number:
            return []
        self._round = None
        return self._take(lambda commit: True)

    def drop_ended(self, leases: LeaseTable) -> list[W]:
        """Takes out the commits of leases that have ended."""
        return self._take(lambda commit: leases.live.get(commit.lease.lease_id) is not commit.lease)

    def _take(self, which: Callable[[W], bool]) -> list[W]:
        taken = [commit for commit in self.waiting.values() if which(commit)]
        for commit in taken:
            del self.waiting[commit.lease.lease_id]
            commit.lease.queued = None
        return taken


def _taken(lease: Lease) -> int:
    """The largest sequence of a lease that has a ticket. No commit is held back."""
    return lease.queued if lease.queued is not None else lease.sequence


def _seen(lease: Lease) -> int:
    return max(lease.sequence, lease.queued or 0, lease.rejected)
