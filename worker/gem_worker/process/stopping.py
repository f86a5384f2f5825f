"""How the threads of a process learn that they shall stop."""

from __future__ import annotations

import threading

from gem_worker.command import Stopped


class Stopping:
    """Set once, by the main thread; whoever sleeps through it, or passes by, then gets `Stopped` raised."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def begun(self) -> bool:
        return self._event.is_set()

    def begin(self) -> None:
        self._event.set()

    def sleep(self, seconds: float) -> None:
        """Waits that many seconds, which may be 0. Raises Stopped at once when it is time to stop."""
        if self._event.wait(seconds):
            raise Stopped
