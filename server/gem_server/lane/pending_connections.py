"""The connections without a lane: not authenticated yet, or told why their lane has ended.

There is a bounded number of them, each for a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable

from gem_server.lane.connection import HELLO_SECONDS
from gem_server.lane.reactor import Served, shut_down

MAX_PENDING = 256
MOMENT_SECONDS = 1.0  # an honest client shows its token sooner, unless hundreds come at once


class PendingConnections:
    """Connections before their token is known, and after their error. Used under the event loop's lock.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[Served, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._since)

    def add(self, served: Served) -> None:
        """Gives a connection its time: a new one, or one that was told why its lane has ended."""
        self.remove(served)
        now = self._since[served] = self._clock()
        served.give_up_at = now + HELLO_SECONDS

    def remove(self, served: Served) -> None:
        self._since.pop(served, None)

    def have_room(self) -> bool:
        """Whether another connection may come. If not, ends those that have had a moment."""
        if len(self._since) < MAX_PENDING:
            return True
        now = self._clock()
        for served, since in self._since.items():
            if since + MOMENT_SECONDS >= now:
                break
            shut_down(served.sock)
        return False
