"""Memory for a checkpoint's copies: prepared before commits have to wait for a copy, and reused once a copy is written.

The operating system provides new memory page by page, at the first write to each. That takes many times as long as the copying.
"""

from __future__ import annotations

import numpy as np
from gem_api.framing import empty
from gem_api.layout import Vector


class Scratch:
    """A pool of buffers of the same size. Not thread-safe: callers in several threads need their own lock. `prepare` needs
    none, because it is called before the others.

    Args:
        size: P, the number of elements of each buffer.

    Attributes:
        nbytes: Bytes of all buffers, including those in use.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Vector] = []
        self.nbytes = 0

    def prepare(self, count: int) -> Scratch:
        """Makes sure that `count` buffers are free, in memory that has been written to. Raises MemoryError."""
        while len(self._free) < count:
            buffer = self._new()
            buffer.fill(0)
            self._free.append(buffer)
        return self

    def copy(self, vector: Vector) -> Vector:
        """Copies a vector (float32, shape (P,)) to a free buffer, or to a new one. Raises MemoryError."""
        buffer = self._free.pop() if self._free else self._new()
        np.copyto(buffer, vector)
        return buffer

    def give_back(self, buffer: Vector) -> None:
        """Returns a copy's buffer to the pool."""
        self._free.append(buffer)

    def lacking(self, count: int) -> int:
        """Bytes of new memory that `count` more copies would need."""
        return max(0, count - len(self._free)) * self._size * np.dtype(np.float32).itemsize

    def _new(self) -> Vector:
        buffer = empty(self._size)
        self.nbytes += buffer.nbytes
        return buffer
