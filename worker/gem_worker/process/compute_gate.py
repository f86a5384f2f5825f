"""Limits how many threads of a process compute at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class ComputeGate:
    """A first-in first-out semaphore for the threads that compute gradients.

    Computing several gradients at once on one core finishes none of them earlier, and each keeps its activations in memory.
    First in, first out makes the workers commit about equally often.

    Args:
        slots: How many threads may compute at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._lock = threading.Lock()
        self._free = slots
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Waits for a free slot and holds it inside the block."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            granted = threading.Lock()
            granted.acquire()
            self._waiting.append(granted)
        granted.acquire()

    def _release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
