"""The beginning of a new run: what it waits for before its first shard is dealt, so that its workers start together."""

from __future__ import annotations

from dataclasses import dataclass, field

from gem_server.core.values import Awaited

LATEST_SECONDS = 600.0  # after the first worker joined; then a run waits no longer for others to join


@dataclass
class Gathering:
    """Decides when a new run begins. Once begun, it never waits again.

    A worker has joined if the run now has more workers than ever before. So one that crashes and comes back holds nobody up,
    whatever its name: each time, its old lease has ended, or ends soon.

    Attributes:
        min_workers: Workers that must be in the run at the same time.
        quiet_seconds: Seconds that must have passed since a worker joined last, or else `LATEST_SECONDS` since the first one.
        begun: Whether the run has begun.
    """

    min_workers: int = 1
    quiet_seconds: float = 0.0
    begun: bool = False
    _most: int = field(default=0, init=False)
    _first_joined: float = field(default=0.0, init=False)
    _last_joined: float = field(default=0.0, init=False)
    _looked: float = field(default=0.0, init=False)  # when the run was last seen with workers

    def resumed(self) -> None:
        """The server has restarted with this run: it does not wait for others to join, but still for `min_workers`."""
        self.quiet_seconds = 0.0

    def joined(self, workers: int, now: float) -> None:
        """A lease has begun; with it, the run has `workers` of them."""
        if workers == 1 and now - self._looked > self.quiet_seconds:
            self._most = 0  # all had left, and none of them has come back: this one is the first again
        if workers > self._most:
            self._first_joined = self._first_joined if self._most else now
            self._most, self._last_joined = workers, now
        self.look(workers, now)

    def look(self, workers: int, now: float) -> Awaited | None:
        """The workers that the run waits for if it has `workers` workers; None once it has begun. It begins if there is nothing
        to wait for."""
        self._looked = now if workers else self._looked
        # Durations, not moments: those, taken from each other, would be off by what a large clock's last digit is worth.
        quiet, latest = self.quiet_seconds, LATEST_SECONDS
        if self._most:
            quiet, latest = quiet - (now - self._last_joined), latest - (now - self._first_joined)
        seconds = max(0.0, min(quiet, latest))
        self.begun = self.begun or (workers >= self.min_workers and not seconds)
        if self.begun:
            return None
        return Awaited(self.min_workers, seconds, max(0.0, latest) if self.quiet_seconds else 0.0)
