"""Reads the next batch of a loader before the loop comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class ReadAhead:
    """One pass over a loader's batches, in their order. If the worker is lost, other workers get a batch that was only read.

    Args:
        batches: Reads them.
        deliver: Called whenever the loop has reached the next one.
    """

    def __init__(self, batches: Iterator[Any], deliver: Callable[[], None]) -> None:
        self._batches, self._deliver = batches, deliver
        self._ahead: list[Any] = []  # the next one, or the end, if it was read

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.read()
            batch = self._ahead.pop()
            if batch is _END:
                return
            self._deliver()
            yield batch

    def read(self) -> None:
        """Reads the next batch, unless that was done."""
        if not self._ahead:
            self._ahead.append(next(self._batches, _END))
