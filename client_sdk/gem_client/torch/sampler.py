"""Batches of sample indices for PyTorch's DataLoader, from the shards that the server leases to this worker."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, NoReturn

from gem_api.errors import InvalidRequest
from torch.utils.data import DataLoader, Dataset, Sampler

from gem_client.run.shards import Shards
from gem_client.session import Session
from gem_client.torch.arguments import require_dataset, require_loader_settings, require_session


class ShardSampler(Sampler[list[int]]):
    """Batches of sample indices from the run's shards. Use it as `for batch in ShardSampler(session, dataset).loader():`.

    **Passes.** One iteration is a pass. A pass usually ends with the run: every sample of every epoch was trained on, or this
    worker has done its steps. It ends earlier if the last batches still have to be committed, or if other workers hold the
    last shards. So iterate again `while not sampler.complete:`. A pass that the loop leaves early is continued by the next one.

    **Shards.** Each step of the session's optimizer covers the batches that it was computed on. A shard is complete when all
    its batches are committed. If a worker dies, the server gives its shards to other workers. If a batch gets no step, it
    comes again, unless the loop calls `Optimizer.skip` for it. After three times iterating raises InvalidRequest.

    **Reading ahead.** `loader` makes a DataLoader that tells the session which batch the loop has reached. It is exact even if
    the DataLoader reads ahead. A plain `DataLoader(dataset, batch_sampler=sampler)` with `num_workers=0` is exact from the
    first step of a pass that follows its batch. With more workers, the session only counts steps: a pass then ends after 100
    shards, and all of these are trained on again if a batch got no step or the loop ended early. Such a DataLoader must not
    fork the session: pass `multiprocessing_context="spawn"`.

    **Smaller batches for slow workers.** If the run's `smallest_share` is below 1, each batch is cut when it is dealt, with the
    share of a whole one that the server wants then. What a DataLoader has read ahead keeps its size; each step tells the
    server the true share. There are few sizes: up to eight shares, and what they leave at the end of a shard. Models with
    BatchNorm need a `smallest_share` of at least 2 samples.

    **Length.** `len()` is the number of batches that this worker would get if it got all that are left. It is exact for a
    single worker or with `--shards replicate`, otherwise an upper bound. It counts whole batches: a slow worker that has its
    own shards may get more, smaller ones. In a run without epochs and steps, `len()` raises TypeError.

    Args:
        session: A session that has joined the run: make the optimizer first.
        dataset: The training set, which must be the same for all workers.
        batch_size: Number of samples per whole batch, on average if the run has `batch_variation`. The default is the run's
            batch size.

    Raises:
        InvalidRequest: The session has not joined, or has a sampler already; or the dataset has no length.
    """

    def __init__(self, session: Session, dataset: Sized, batch_size: int | None = None) -> None:
        require_session(session)
        require_dataset(dataset)
        self._dataset = dataset
        self._shards = session.shards(len(dataset), batch_size)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest(
            "a sampler can't be copied or pickled, as its shards are dealt to one worker: make one per session"
        )

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._shards)

    def __len__(self) -> int:
        most = self._shards.most_batches
        if most is None:
            raise TypeError("the number of batches is unlimited: this run has neither epochs nor steps")
        return most

    @property
    def complete(self) -> bool:
        """Whether the run is complete, or this worker has done its steps."""
        return self._shards.complete

    @property
    def samples_in_hand(self) -> int:
        """Number of samples in the youngest batch that the loop has; 0 if it has none, or if that is not known."""
        return self._shards.samples_in_hand

    def loader(self, **settings: Any) -> Loader:
        """Returns an iterable over batches of the dataset, made by a `DataLoader` with this sampler.

        Args:
            settings: Further arguments of `DataLoader`, such as `num_workers` and `collate_fn`. Worker processes are spawned
                unless `multiprocessing_context` says otherwise, and import the script: put its code under
                `if __name__ == "__main__":`.

        Raises:
            InvalidRequest: The batches would come in another order (`in_order=False`), or a setting says which samples they
                have, such as `batch_size`.
        """
        require_loader_settings(settings)
        if not settings.get("in_order", True):
            raise InvalidRequest(
                "in_order=False is not available: a commit completes the batches in the order in which they were dealt. Leave "
                "it out"
            )
        if settings.get("num_workers"):
            settings = {"multiprocessing_context": "spawn", **settings}
        dataset: Dataset[Any] = self._dataset  # type: ignore[assignment]
        return Loader(DataLoader(dataset, batch_sampler=self, **settings), self._shards)


class Loader:
    """A DataLoader that tells the session which batch the loop has reached. `ShardSampler.loader` makes it."""

    def __init__(self, loader: DataLoader[Any], shards: Shards) -> None:
        self._loader = loader
        self._shards = shards

    def __iter__(self) -> Iterator[Any]:
        self._shards.loader_tells()
        for batch in self._loader:
            self._shards.deliver()
            yield batch

    def __len__(self) -> int:
        return len(self._loader)


class Passes:
    """A loader without a length, for trainers that iterate once for each of their epochs. Each iteration is a pass of the
    sampler; `more` says whether another one is needed.

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
