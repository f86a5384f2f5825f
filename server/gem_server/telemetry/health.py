"""The server's health: whether it lives and whether it is ready, for the probes of its HTTP port."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
STUCK_SECONDS = 30.0  # without a beat; the longest known pause of a busy event loop is a few seconds
_STARTING = "starting: the run is being restored from its checkpoint and its log"
_ENDING = "shutting down: the queued commits are applied, then the last checkpoint is written"


class Health:
    """Says why the server is not alive, or not ready; from any thread, and without waiting for the event loop.

    A server that starts or ends is alive, however long that takes: only between `serving` and `ending` its event loop must
    call `beat` every `BEAT_SECONDS`.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at = math.inf  # no beat is expected
        self._why_unready: Callable[[], str] = lambda: _STARTING

    def serving(self, why_stalled: Callable[[], str]) -> None:
        """The server serves from now on. `why_stalled` returns why it can't acknowledge commits; empty if it can."""
        self._why_unready = why_stalled
        self.beat()

    def beat(self) -> None:
        """The event loop turns."""
        self._beat_at = self._clock()

    def ending(self) -> None:
        """The server shuts down from now on."""
        self._beat_at, self._why_unready = math.inf, lambda: _ENDING

    def why_dead(self) -> str:
        """The reason why the process should be replaced; empty if it lives."""
        silent = self._clock() - self._beat_at
        return f"the event loop has not turned for {silent:.0f} s" if silent > STUCK_SECONDS else ""

    def why_unready(self) -> str:
        """The reason why workers can't train with this server now; empty if they can."""
        return self.why_dead() or self._why_unready()
