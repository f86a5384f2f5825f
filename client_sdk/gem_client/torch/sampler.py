"""Batches of sample indices for PyTorch's DataLoader, from the shards that the server leases to this worker."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any, NoReturn

import numpy as np
from gem_api.errors import InvalidRequest
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from gem_client.run.shards import Shards
from gem_client.session import Session
from gem_client.torch.arguments import require_dataset, require_loader_settings, require_session
from gem_client.torch.rank_session import RankSession, RankShards
from gem_client.torch.read_ahead import ReadAhead


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
    server the true share. There are few sizes: up to sixteen shares, and what they leave at the end of a shard. No
    batch is cut to a single sample, on which BatchNorm fails.

    **Length.** `len()` is the number of batches that this worker gets if it gets all of the run's; in a run with steps, at most
    those of its steps that are left. It is exact for a single worker or with `--shards replicate`, otherwise an upper bound. It
    counts whole batches: a slow worker that has its own shards may get more, smaller ones. Within a loop over `epochs` it
    counts one epoch. In a run without epochs and steps, `len()` raises TypeError. `len(loader.dataset)` is the size of the
    whole training set.

    Args:
        session: A session that has joined the run: make the optimizer first.
        dataset: The training set, which must be the same for all workers. If a `Subset` has other samples than theirs, as
            that of a `random_split` with another seed, or has them in another order, iterating raises InvalidRequest.
        batch_size: Number of samples per whole batch, on average if the run has `batch_variation`. The default is the run's
            batch size.

    Raises:
        InvalidRequest: The session has not joined, or has a sampler already; or the dataset has no length.
    """

    def __init__(self, session: Session | RankSession, dataset: Sized, batch_size: int | None = None) -> None:
        require_session(session)
        require_dataset(dataset)
        self._dataset = dataset
        self._shards = session.shards(len(dataset), batch_size, samples_of(dataset))
        self._drawn_from = False  # since the epoch began

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest(
            "a sampler can't be copied or pickled, as its shards are dealt to one worker: make one per session"
        )

    def __iter__(self) -> Iterator[list[int]]:
        self._drawn_from = True
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

    def epochs(self, *schedulers: LRScheduler, at_end: Callable[[], Any] | None = None) -> Iterator[Epoch]:
        """The run's epochs, one after the other: `for epoch in sampler.epochs(): for batch in epoch.loader(): ...`.

        The server deals each sample of an epoch to one worker, and then the next epoch: workers wait for each other only at the
        end of the run. A worker that comes later begins in the run's epoch. An epoch of which it got no sample is left out. If
        the loop leaves an epoch early, the next one is the rest of it.

        Args:
            schedulers: Schedulers that count epochs. Each is stepped until it is at the run's epoch, before that begins, so
                that the rates of all workers agree. Leave out `scheduler.step()`.
            at_end: Called once, after the run's last batch. Give `optimizer.load_final`: what follows the last batch in the
                loop, such as a validation, then has the run's final θ. `epoch.loader()` calls it when all its batches have
                their commits. If some still wait for `Optimizer.finish` (accumulated gradients, local steps), or if the loop
                has another loader, it is called after the last epoch instead. A loop that ends early, by `break` or an error,
                does not call it.

        Raises:
            InvalidRequest: While iterating: the loop asked for the next epoch, but for no batch of this one. It would come
                again without end.
        """
        last = _Once(at_end)
        try:
            while (number := self._shards.next_epoch()) is not None:
                for scheduler in schedulers:
                    step_to(number, scheduler)
                self._drawn_from = False
                yield Epoch(number, self, last)
                if not self._drawn_from:
                    raise InvalidRequest(
                        f"the loop took no batch of epoch {number} from the sampler, so it would come again without end: "
                        "iterate over epoch.loader() instead of a DataLoader of your own, or leave sampler.epochs() out"
                    )
            last()
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
        self._drawn_from = True
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


def samples_of(dataset: Sized) -> bytes:
    """SHA-256 of the samples that a `Subset` has chosen of a data set, in their order, as `random_split` draws them; empty if
    it is not known which these are."""
    digest, chosen = hashlib.sha256(), False
    while isinstance(dataset, Subset):
        try:
            digest.update(np.asarray(dataset.indices, np.int64).tobytes())
        except (TypeError, ValueError, OverflowError):  # keys of another kind
            return b""
        dataset, chosen = dataset.dataset, True  # type: ignore[assignment]
    return digest.digest() if chosen else b""


def step_to(epoch: int, scheduler: LRScheduler) -> None:
    """Steps a scheduler that counts epochs to this one, if it is not there yet."""
    with warnings.catch_warnings():  # PyTorch expects a step of the optimizer first, which a late worker has not made
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        while scheduler.last_epoch < epoch:
            scheduler.step()


class _Once:
    """Calls a function at its own first call alone."""

    def __init__(self, work: Callable[[], Any] | None) -> None:
        self._work = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class Epoch(int):
    """One of the run's epochs, as far as it was dealt to this worker: see `ShardSampler.epochs`. It is its number in the run,
    from 0, and may stand wherever a loop had an int. To save it, write `epoch.number`, which is a plain int.

    Args:
        number: Its number.
        sampler: Deals its batches.
        at_end: Called when the loop has had the run's last batch.
    """

    def __new__(cls, number: int, sampler: ShardSampler, at_end: Callable[[], Any]) -> Epoch:
        epoch = super().__new__(cls, number)
        epoch._sampler, epoch._at_end = sampler, at_end
        return epoch

    _sampler: ShardSampler
    _at_end: Callable[[], Any]

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("an epoch can't be copied or saved, as it deals this worker's batches: save epoch.number")

    @property
    def number(self) -> int:
        """Its number as a plain int."""
        return int(self)

    def loader(self, **settings: Any) -> Loader:
        """An iterable over this worker's batches of the epoch. Arguments and errors are those of `ShardSampler.loader`.

        It ends without the last batches if these wait for the loop, which accumulates gradients or makes local steps: call
        `Optimizer.finish` after it. What is left of an epoch comes with the next one, or in the same one again.

        Other workers take some of the epoch's batches, and which is not known before. So its `len()` is the number of batches
        of the whole epoch: exact for a single worker, else more than this worker gets. It stays if others come or die."""
        return _EpochLoader(self._sampler.loader(**settings), self._at_end)


class Loader:
    """A DataLoader that tells the session which batch the loop has reached. `ShardSampler.loader` makes it."""

    def __init__(self, loader: DataLoader[Any], shards: Shards | RankShards) -> None:
        self._loader = loader
        self._shards = shards

    def __iter__(self) -> Iterator[Any]:
        yield from self.ahead()

    def ahead(self, reading: Callable[[Iterator[Any]], Iterator[Any]] = iter) -> ReadAhead:
        """One pass over the batches, for a loop that has time to `read` the next one while its device computes.

        Args:
            reading: Gets the batches, and yields them: for example to time each.
        """
        self._shards.loader_tells()
        return ReadAhead(reading(iter(self._loader)), self._shards.deliver)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def dataset(self) -> Dataset[Any]:
        """The training set, all of it."""
        return self._loader.dataset


class _EpochLoader(Loader):
    """A loader of one epoch, which waits for what other workers still hold of it."""

    def __init__(self, loader: Loader, at_end: Callable[[], Any]) -> None:
        super().__init__(loader._loader, loader._shards)
        self._at_end = at_end

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        while self._shards.goes_on:
            yield from super().__iter__()
        if self._shards.is_over:
            self._at_end()


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
