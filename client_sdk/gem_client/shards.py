"""Batches of sample indices from leased shards, and which of them have been committed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb


class Source(Protocol):
    """What shards come from: a session."""

    @property
    def hyperparameters(self) -> Hyperparameters: ...

    @property
    def steps_done(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def lease_shard(self, samples: int, holding: Collection[int]) -> pb.LeaseShardResponse: ...

    def complete_shard(self, shard_id: int) -> None: ...


class Batch(NamedTuple):
    """A batch handed out: its size, its shard, whether it is that shard's last, the lease that it came under."""

    samples: int
    shard_id: int
    last: bool
    generation: int


class Shards:
    """Iterates over batches (lists of sample indices) until the run is complete, or the worker's steps are done.

    A batch never straddles two shards. Commits complete batches in the order in which they were handed out, so a data
    loader may read ahead as long as it keeps their order. One that does so at the end of the run makes the iteration end
    while its last batches are still to be committed; `complete` then says whether to iterate once more.

    Args:
        session: The session that has joined the run.
        samples: Size of the training set.
        batch_size: Indices per batch; a shard's last batch may have fewer.

    Attributes:
        complete: Whether the run is complete, or this worker's steps are done.
    """

    def __init__(self, session: Source, samples: int, batch_size: int) -> None:
        self._session = session
        self._samples = samples
        self._batch_size = batch_size
        self._uncommitted: deque[Batch] = deque()
        self.complete = False

    def __iter__(self) -> Iterator[list[int]]:
        steps = self._session.hyperparameters.steps
        while not steps or self._session.steps_done + len(self._uncommitted) < steps:
            # What is not named here goes back: shards whose answer was lost, and those that the caller broke off.
            holding = {batch.shard_id for batch in self._uncommitted if batch.generation == self._session.generation}
            response = self._session.lease_shard(self._samples, holding)
            if response.HasField("complete"):
                self.complete = True
                return
            if response.HasField("shard"):
                yield from self._batches(response.shard.shard_id, list(response.shard.indices), steps)
            elif self._uncommitted:
                return  # the shards that the server waits for are this worker's own: let the caller commit them
            else:
                time.sleep(response.wait_seconds)
        self.complete = True

    def _batches(self, shard_id: int, indices: list[int], steps: int) -> Iterator[list[int]]:
        generation = self._session.generation
        for begin in range(0, len(indices), self._batch_size):
            if self._session.generation != generation:
                return  # the lease has ended: others train on the rest
            if steps and self._session.steps_done + len(self._uncommitted) >= steps:
                return
            batch = indices[begin : begin + self._batch_size]
            last = begin + self._batch_size >= len(indices)
            self._uncommitted.append(Batch(len(batch), shard_id, last, generation))
            yield batch

    def samples_in(self, batches: int) -> int:
        """Samples in the oldest uncommitted batches."""
        return sum(batch.samples for batch in islice(self._uncommitted, batches))

    def committed(self, batches: int) -> None:
        """The oldest batches are part of the run now, or were refused for what they are and are left out of it."""
        for batch in self._take(batches):
            if batch.last and batch.generation == self._session.generation:
                self._session.complete_shard(batch.shard_id)

    def dropped(self, batches: int) -> None:
        """The gradient of the oldest batches was dropped; their shards have gone back."""
        self._take(batches)

    def _take(self, batches: int) -> list[Batch]:
        return [self._uncommitted.popleft() for _ in range(min(batches, len(self._uncommitted)))]
