"""Reads the next batch of a loader before the loop comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gem_client.torch.sampler import Loader

_END = object()


class ReadAhead:
    """A pass over a sampler's loader, for a loop that has time to read while its device computes.

    It yields the loader's batches in their order, and tells the session which one the loop has reached. If the worker is lost,
    other workers get a batch that was only read.

    Args:
        loader: The sampler's.
        reading: Gets the batches, and yields them: for example to time each.
    """

    def __init__(self, loader: Loader, reading: Callable[[Iterator[Any]], Iterator[Any]] = iter) -> None:
        self._shards = loader._shards
        self._shards.loader_tells()
        self._batches = reading(iter(loader._loader))
        self._ahead: list[Any] = []  # the next one, or the end, if it was read

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.read()
            batch = self._ahead.pop()
            if batch is _END:
                return
            self._shards.deliver()
            yield batch

    def read(self) -> None:
        """Reads the next batch, unless that was done."""
        if not self._ahead:
            self._ahead.append(next(self._batches, _END))
