"""Tells the threads of a process to stop."""

from __future__ import annotations

import threading

from gem_worker.command import Stopped


class Stopping:
    """A flag that is set once. From then on every `sleep` raises `Stopped`, also one in progress."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def begun(self) -> bool:
        return self._event.is_set()

    def begin(self) -> None:
        self._event.set()

    def sleep(self, seconds: float) -> None:
        """Waits for `seconds`, which may be 0. Raises Stopped as soon as stopping has begun."""
        if self._event.wait(seconds):
            raise Stopped
