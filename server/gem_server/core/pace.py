"""Finds workers that renew their lease in the background, but no longer train."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

# A worker is stalled once its pause is longer than each of three limits.
PAUSE_FACTOR = 10  # times the longest pause of any worker in the run
MIN_PAUSE_SECONDS = 600.0
MIN_PAUSE_LEASES = 20  # lease durations
# In place of the last two, for a worker without a whole step so far: it may load data and compile.
FIRST_STEP_SECONDS = 3600.0
FIRST_STEP_LEASES = 120  # lease durations
_REMEMBERED = 10_000


@dataclass
class Pace:
    """Pauses: when each worker last asked for what training needs (a commit, θ, a shard), or said that it waits for that.

    Nobody knows how long a step may take, so the workers themselves show it. Those that come back after their lease has ended
    here show it too: such a pause is usual in this run, and ends no lease again. A restart forgets all of it.

    Attributes:
        lease_seconds: Seconds that a lease lives without a sign of life.
        longest: The longest pause of a worker so far, in seconds.
    """

    lease_seconds: float
    longest: float = 0.0
    _seen: dict[str, float] = field(default_factory=dict)
    _commits: dict[str, int] = field(default_factory=dict)
    _stalled: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def restart(self) -> None:
        """Forgets everything: what a log tells has no times."""
        self.longest = 0.0
        for known in (self._seen, self._commits, self._stalled):
            known.clear()

    def begin(self, lease_id: str, now: float) -> None:
        """A worker has joined, or its lease is restored: its pause begins."""
        self._seen[lease_id] = now

    def seen(self, lease_id: str, now: float, committed: bool = False, usual: bool = True) -> None:
        """A worker asks for something, be it under a lease that has ended. Its pause is not `usual` if the server slept."""
        before = self._stalled.pop(lease_id, None) if self._stalled else None
        if lease_id in self._seen:
            before, self._seen[lease_id] = self._seen[lease_id], now
            if committed:
                self._commits[lease_id] = self._commits.get(lease_id, 0) + 1
        if before is not None and usual and now - before > self.longest:
            self.longest = now - before

    def stalled(self, lease_id: str, now: float) -> bool:
        """Whether the worker of a live lease makes a far longer pause than any before. The pause of a restored lease
        begins now."""
        return now - self._seen.setdefault(lease_id, now) > self.limit(lease_id)

    def limit(self, lease_id: str) -> float:
        """Seconds that a pause of the lease's worker may take."""
        shortest, leases = (
            (MIN_PAUSE_SECONDS, MIN_PAUSE_LEASES)
            if self._commits.get(lease_id, 0) > 1
            else (FIRST_STEP_SECONDS, FIRST_STEP_LEASES)
        )
        return max(PAUSE_FACTOR * self.longest, shortest, leases * self.lease_seconds)

    def suspended(self, seconds: float, now: float) -> None:
        """The server itself stood still for so long, which is nobody's pause."""
        self._seen = {lease_id: min(at + seconds, now) for lease_id, at in self._seen.items()}

    def end(self, lease_id: str, stalled: bool) -> None:
        """A lease has ended, because its worker is `stalled` or for another reason."""
        at = self._seen.pop(lease_id, None)
        self._commits.pop(lease_id, None)
        if stalled and at is not None:
            self._stalled[lease_id] = at
            if len(self._stalled) > _REMEMBERED:
                self._stalled.popitem(last=False)
