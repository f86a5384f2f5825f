"""The batches of a run for trainers that iterate once for each of their epochs: gem_client.lightning and .transformers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from gem_client.torch.sampler import ShardSampler


class Passes:
    """A loader without a length. Each iteration is a pass of the sampler; `more` says whether another one is needed.

    A trainer may read ahead: it calls `deliver` when it begins to train on the next batch.

    Args:
        sampler: The session's sampler.
        settings: Further arguments of `DataLoader`.
    """

    def __init__(self, sampler: ShardSampler, **settings: Any) -> None:
        self._sampler = sampler
        self._shards = sampler._shards
        self._loader = sampler.loader(**settings)._loader
        self._first: list[Any] = []  # the first batch of a pass that `more` has begun
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        if self.more():
            yield self._first.pop()
            yield from self._batches

    def more(self) -> bool:
        """Begins the next pass, and returns whether it has a batch. If not, the run is complete, or this worker has done its
        steps. Waits while other workers hold the last shards. Call it when every batch so far is committed or skipped."""
        while not self._first and not self._sampler.complete:
            self._shards.loader_tells()
            self._batches = iter(self._loader)
            self._first = list(islice(self._batches, 1))
        return bool(self._first)

    @property
    def complete(self) -> bool:
        """Whether the run is complete, or this worker has done its steps, and no batch is left to train on."""
        return self._sampler.complete and not self._first

    def deliver(self) -> None:
        """Says that the trainer begins to train on the next batch."""
        self._shards.deliver()
