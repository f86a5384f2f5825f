"""Who of many threads may compute now."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets a few threads at a time through, in the order in which they ask.

    Gradients that are computed side by side on one core are no sooner done, and each keeps its activations in memory meanwhile.
    The order has the workers commit about equally often: without it, some would wait while others overtake them.

    Args:
        count: How many at a time.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """One turn, waited for and given back."""
        self._take()
        try:
            yield
        finally:
            self._give_back()

    def _take(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def _give_back(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
