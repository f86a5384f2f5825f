"""Limits how many threads of a process compute at the same time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ComputeGate:
    """A semaphore for the threads that compute gradients. A free slot goes to any of the waiting threads, at random.

    Computing several gradients at once on one core finishes none of them earlier, and each keeps its activations in memory.

    Turns in a fixed order would make the workers commit in lockstep: every gradient would be exactly one round old, and with
    such a delay training becomes unstable (docs/results/many-workers). Workers on machines of their own vary in speed; at
    random, staleness is spread as if each took an exponentially distributed time, and all still commit about equally often.

    Args:
        slots: How many threads may compute at the same time.
        seed: Of the order of the turns.
    """

    def __init__(self, slots: int, seed: int | None = None) -> None:
        self._lock = threading.Lock()
        self._free = slots
        self._waiting: list[threading.Lock] = []
        self._random = random.Random(seed)

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
                self._waiting.pop(self._random.randrange(len(self._waiting))).release()
            else:
                self._free += 1
