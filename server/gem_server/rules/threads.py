"""The threads that apply one commit of a large model together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from gem_api.process.host_limits import apply_threads

MIN_PART_ELEMENTS = 1 << 20  # elements for each thread: starting its work costs tens of microseconds, more while Python is busy


class Threads:
    """Runs the parts of a pass in parallel: the caller works on one, the threads of a pool on the others.

    Args:
        count: Maximum number of parts; 0 for one for each core that this process may use, up to MAX_APPLY_THREADS.
        least: Minimum number of elements in a part.
    """

    def __init__(self, count: int = 0, least: int = MIN_PART_ELEMENTS) -> None:
        self.count = count or apply_threads()
        self._least = least
        self._pool = ThreadPoolExecutor(max(1, self.count - 1), "apply-part")  # it starts its threads when they have work

    def parts(self, size: int) -> int:
        """The number of parts for a pass over `size` elements."""
        return max(1, min(self.count, size // self._least))

    def run(self, work: Callable[[int], None], parts: int) -> None:
        """Calls work(0) … work(parts - 1), which must release the GIL. Returns when all have returned; raises what one
        raised. Several threads may call it at once: they share the pool."""
        if parts == 1:
            work(0)  # without any overhead: small models commit thousands of times a second
            return
        others = [self._pool.submit(work, part) for part in range(1, parts)]
        try:
            work(0)
        finally:
            wait(others)
        while others:
            others.pop().result()  # popped: an error would keep this frame, and so itself and all that the work holds
