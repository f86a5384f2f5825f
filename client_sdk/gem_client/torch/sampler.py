"""Batches of sample indices for PyTorch's DataLoader, from the shards that the server leases to this worker."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, NoReturn

from gem_api.errors import InvalidRequest
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from gem_client.run.shards import Shards
from gem_client.session import Session
from gem_client.torch.arguments import require_dataset, require_loader_settings, require_session
from gem_client.torch.rank_session import RankSession, RankShards


class ShardSampler(Sampler[list[int]]):
    """Batches of sample indices from the run's shards. Use it as `for batch in ShardSampler(session, dataset).loader():`, or
    by epochs: see `epochs`.

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

    def __init__(self, session: Session | RankSession, dataset: Sized, batch_size: int | None = None) -> None:
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

    def epochs(self, *schedulers: LRScheduler) -> Iterator[Epoch]:
        """The run's epochs, one after the other: `for epoch in sampler.epochs(): for batch in epoch.loader(): ...`.

        The server deals each sample of an epoch to one worker, and then the next epoch: workers wait for each other only at the
        end of the run. A worker that comes later begins in the run's epoch. An epoch of which it got no sample is left out. If
        the loop leaves an epoch early, the next one is the rest of it.

        Args:
            schedulers: Schedulers that count epochs. Each is stepped until it is at the run's epoch, before that begins, so
                that the rates of all workers agree. Leave out `scheduler.step()`.
        """
        try:
            while (number := self._shards.next_epoch()) is not None:
                for scheduler in schedulers:
                    step_to(number, scheduler)
                yield Epoch(number, self)
        finally:
            self._shards.end_epochs()

    def items(self) -> Iterator[Any]:
        """The items of the dataset that the server deals to this worker, one at a time, for a loop that makes many steps of
        each: `for file in sampler.items(): for batch in read(file): ...`, with a list of files as the dataset.

        An item is complete when the loop asks for the next one, and every step before that is committed. If local steps wait,
        the next commit completes it, or `Optimizer.finish` after the loop. An item of a worker that dies comes again as a
        whole, to another worker; so does one that the loop leaves early, to this one. Start the run with `batch_size` and
        `shard_size` 1, which deals single items. `Optimizer.skip` only counts the batches that the loop leaves out.

        Raises:
            InvalidRequest: While iterating: the optimizer has `batches_per_step`, or an item was left early three times.
        """
        return (self._dataset[index] for index in self._shards.items())  # type: ignore[index]

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


def step_to(epoch: int, scheduler: LRScheduler) -> None:
    """Steps a scheduler that counts epochs to this one, if it is not there yet."""
    with warnings.catch_warnings():  # PyTorch expects a step of the optimizer first, which a late worker has not made
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        while scheduler.last_epoch < epoch:
            scheduler.step()


class Epoch:
    """One of the run's epochs, as far as it was dealt to this worker: see `ShardSampler.epochs`.

    Args:
        number: Its number in the run, from 0.
        sampler: Deals its batches.
    """

    def __init__(self, number: int, sampler: ShardSampler) -> None:
        self.number = number
        self._sampler = sampler

    def loader(self, **settings: Any) -> Iterator[Any]:
        """An iterator over this worker's batches of the epoch. Arguments and errors are those of `ShardSampler.loader`.

        It ends without the last batches if these wait for the loop, which accumulates gradients or makes local steps: call
        `Optimizer.finish` after it. What is left of an epoch comes with the next one, or in the same one again."""
        return self._passes(self._sampler.loader(**settings))

    def _passes(self, loader: Loader) -> Iterator[Any]:
        yield from loader
        while self._sampler._shards.goes_on:
            yield from loader


class Loader:
    """A DataLoader that tells the session which batch the loop has reached. `ShardSampler.loader` makes it."""

    def __init__(self, loader: DataLoader[Any], shards: Shards | RankShards) -> None:
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
    """A loader without a length, for trainers that iterate once for each of their epochs. Each iteration is one of the run's
    epochs, as far as it was dealt to this worker, or what is left of it; `more` says whether there is another one.

    A trainer may read ahead: it calls `deliver` when it begins to train on the next batch.

    Args:
        sampler: The session's sampler.
        settings: Further arguments of `DataLoader`.

    Attributes:
        epoch: The number of the epoch, from 0, that `more` has begun last.
    """

    def __init__(self, sampler: ShardSampler, **settings: Any) -> None:
        self.epoch = 0
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
        """Begins the next epoch, and returns whether it has a batch. If not, the run is complete, or this worker has done its
        steps. Waits while other workers hold the last shards. Call it when every batch so far is committed or skipped."""
        while not self._first and (epoch := self._shards.next_epoch()) is not None:
            self.epoch = epoch
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
