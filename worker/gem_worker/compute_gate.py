"""Limits how many threads of a process compute at the same time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def first_come(waiting: int) -> int:
    """Chooses the thread that has waited longest."""
    return 0


TURNS: dict[str, Callable[[int], int]] = {"random": random.randrange, "fixed": first_come}


class ComputeGate:
    """A semaphore for the threads that compute gradients.

    Computing several gradients at once on one core finishes none of them earlier, and each keeps its activations in memory.

    If turns are first come, first served, the workers commit in lockstep: every gradient is exactly one round old, and with
    such a delay training becomes unstable (docs/results/many-workers). If they are random, staleness is spread as if each
    gradient took an exponentially distributed time, and all workers still commit about equally often.

    Args:
        slots: How many threads may compute at the same time.
        choose: Which of the threads that wait gets a free slot: called with their number, it returns an index. They are in the
            order in which they came.
    """

    def __init__(self, slots: int, choose: Callable[[int], int] = random.randrange) -> None:
        self._lock = threading.Lock()
        self._free = slots
        self._waiting: list[threading.Lock] = []
        self._choose = choose

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
                self._waiting.pop(self._choose(len(self._waiting))).release()
            else:
                self._free += 1
