"""The threads that apply one commit of a large model together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property

from gem_api.process.host_limits import cores

MAX_THREADS = 8  # more are not faster: memory bandwidth is the limit
MIN_PART_ELEMENTS = 1 << 20  # elements for each thread: starting its work costs tens of microseconds, more while Python is busy


class Threads:
    """Runs the parts of a pass in parallel: the caller works on one, the threads of a pool on the others.

    Args:
        count: Maximum number of parts; 0 for the number of cores that this process may use, up to MAX_THREADS.
        least: Minimum number of elements in a part.
    """

    def __init__(self, count: int = 0, least: int = MIN_PART_ELEMENTS) -> None:
        self.count = count or min(MAX_THREADS, cores())
        self._least = least

    def parts(self, size: int) -> int:
        """The number of parts for a pass over `size` elements."""
        return max(1, min(self.count, size // self._least))

    def run(self, work: Callable[[int], None], parts: int) -> None:
        """Calls work(0) … work(parts - 1), which must release the GIL. Returns when all have returned; raises what one
        raised."""
        if parts == 1:
            work(0)  # without any overhead: small models commit thousands of times a second
            return
        others = [self._pool.submit(work, part) for part in range(1, parts)]
        try:
            work(0)
        finally:
            wait(others)
        for other in others:
            other.result()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.count - 1, "apply-part")
