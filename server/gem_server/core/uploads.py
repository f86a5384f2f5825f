"""The memory where gradients arrive: a few buffers for all workers, because few large gradients arrive at once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gem_api.framing import CHUNK_BYTES
from gem_api.layout import Vector

STALLED = 15.0  # seconds in which a gradient must grow by a chunk, or it is stalled: on 1 Mbit/s a chunk takes 9


def _nothing(upload: Upload) -> None: ...


@dataclass(eq=False)
class Upload:
    """Memory for one gradient. It is free again once everyone who uses it has released it: the call, the queue, the log.

    Attributes:
        gradient: float32, shape (P,).
        freed: Called when the last user has released it.
    """

    gradient: Vector
    freed: Callable[[Upload], None] = _nothing
    _users: int = 1

    def hold(self) -> None:
        """Adds a user."""
        self._users += 1

    def release(self) -> None:
        """Call this once for each user."""
        self._users -= 1
        if not self._users:
            self.freed(self)


@dataclass(eq=False)
class Arrival:
    """A gradient that arrives, in memory of its own. Times are seconds of the caller's clock.

    Attributes:
        lease_id: Whose gradient it is; empty once the lease has ended.
        nbytes: Its bytes, as float32.
        began: When it got its memory.
        slow_since: Since when it is slow; None: it is not. It stays slow.
        ending: Whether its upload was told to end, so that its memory is soon free.
        stalls_at: When it is stalled unless it grows. A byte now and then does not count for long.
    """

    lease_id: str
    nbytes: int
    began: float
    slow_since: float | None = None
    ending: bool = False
    stalls_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.stalls_at = self.began + STALLED

    def grown(self, nbytes: int, now: float) -> None:
        """Notes bytes that have come."""
        self.stalls_at = min(now + STALLED, max(now, self.stalls_at) + STALLED * nbytes / CHUNK_BYTES)


def gives_way(arrivals: Collection[Arrival], now: float, reserve_taken: bool) -> Arrival | None:
    """The gradient whose upload has to end while another waits for memory: the one that has been stalled for longest; if slow
    ones also hold the buffer that is kept for others (`reserve_taken`), the one that became slow last. None: none has to."""
    stalled = [arrival for arrival in arrivals if arrival.stalls_at < now]
    if stalled:
        return min(stalled, key=lambda arrival: arrival.stalls_at)
    slow = [arrival for arrival in arrivals if arrival.slow_since is not None]
    return max(slow, key=lambda arrival: (arrival.slow_since, arrival.began)) if slow and reserve_taken else None
