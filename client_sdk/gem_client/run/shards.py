"""Iterates over batches of sample indices from leased shards, and tracks which batches were committed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from numbers import Integral
from typing import NamedTuple

import numpy as np
from gem_api.errors import InvalidRequest
from gem_api.v1 import training_pb2 as pb

from gem_client.run.batch_sizes import batch_sizes, smallest_batch
from gem_client.run.hand import Hand
from gem_client.run.membership import Membership
from gem_client.run.pending_commit import Batch, HeldShard
from gem_client.transport.side_thread import SideThread

log = logging.getLogger("gem_client")

IDLE_SECONDS = 0.5  # pause between two passes if nothing was committed: the same batches may come again at once
LONG_WAIT = 20  # requests for a shard in a row, half a second apart, after which a worker says whom it waits for
MAX_UNREPORTED = 100  # finished shards that a worker has not reported yet; the server lets it hold 1,000


class LeasedShard(NamedTuple):
    """The server's response to a request for a shard, and the number of the lease that the request was made under."""

    response: pb.LeaseShardResponse
    generation: int


class Shards:
    """Iterates over batches (lists of sample indices) until the run is complete, or the worker has done its steps.

    A session has one; `open` makes it ready. A session that never opens it has no batches, and its commits cover none.

    All samples of a batch come from one shard. A batch is cut when it is handed out. It has the share of a whole batch that the
    server wants then (`Session.batch_share`), the same for all batches of a step. The last one of a shard has what is left.

    A shard is reported as complete when each of its samples was in a batch that was committed, or left out by `Session.skip`. A
    batch that gets neither comes again: after the rest of its shard, or first in the next pass. A pass that the loop leaves
    early is continued by the next one.

    The batches that a commit covers are known exactly in two cases: the loop takes one batch at a time, or a loader says which
    batches it has delivered (`ShardSampler.loader`). Any other reader that reads ahead must keep the order of the batches. Its
    commits are only counted. Its shards are reported when as many batches were committed as handed out: at the end of a pass,
    which comes after 100 shards at the latest. If the counts differ when the next pass begins, all these shards come again.
    A pass of `items` hands out single samples, which no commit covers: the loop is done with one when it asks for the next.

    An iteration may therefore end while the last batches still have to be committed. Iterate again until `complete` is True.

    Attributes:
        complete: Whether the run is complete, or this worker has done its steps.
        batches_per_step: Number of batches that the loop computes each of its steps on.
        skipped: Number of batches that `skip` has taken out of the run.

    Raises:
        InvalidRequest: While iterating or at a commit: a batch came three times and got no step, or three commits in a row
            did not cover the same number of batches.
    """

    def __init__(self, member: Membership, side: SideThread, wait_for_commit: Callable[[], None]) -> None:
        self._member = member
        self._side = side  # makes the calls, while the caller computes
        self._wait_for_commit = wait_for_commit
        self._samples = self._batch_size = 0
        self._fingerprint = b""  # of the samples and their order
        self._lock = threading.Lock()  # commits end in another thread than the loop's if they overlap with it
        self._held: dict[int, HeldShard] = {}  # shards that are not reported as complete yet
        self._due: deque[Batch | HeldShard] = deque()  # batches that come again, and shards that are not wholly cut yet
        self._share = 1.0  # of the batches of the step that batches are handed out for
        self._hand = Hand()
        self._window: list[Batch] = []  # those of the local steps that the next commit covers
        self._by_item = False  # whether the loop makes any number of commits of a batch, and then asks for the next one
        self._steps_wait = False  # whether local steps on the item in hand wait for a commit
        self._item_lost = False  # whether a commit of the item in hand was lost
        self._claimed = 0  # batches of commits whose result is not known yet
        self._got_on = True  # whether a batch was committed or skipped since the pass began
        self._passes = 0
        self._told_of_whole_batches = False
        self._waits = 0  # in a row, for a shard
        self._epoch: int | None = None  # no batches of later ones are handed out
        self._ahead: Future[LeasedShard] | None = None
        self._completing: Future[None] | None = None
        self.complete = False
        self.batches_per_step = 1
        self.skipped = 0

    def open(self, samples: int, batch_size: int | None, fingerprint: bytes = b"") -> Shards:
        """Makes the iterator ready for a training set, as `Session.shards`."""
        if self._batch_size:
            raise InvalidRequest("this session has a sampler already: use that one")
        if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 0):
            raise InvalidRequest(f"a batch holds a whole number of samples, at least 1, not {batch_size!r}")
        settings = self._member.hyperparameters
        batch_size = batch_size or settings.batch_size
        if batch_size > settings.shard_size:
            log.warning(
                "batches hold at most %d samples instead of %d, the run's shard size: start the run with a larger shard_size",
                settings.shard_size, batch_size,
            )  # fmt: skip
        commit = batch_size * self.batches_per_commit
        if settings.batch_variation and smallest_batch(batch_size, settings.batch_variation) == batch_size:
            log.warning(
                "batches of %d are too small for batch_variation %g: start the run with a larger --batch-size",
                batch_size, settings.batch_variation,
            )  # fmt: skip
        elif settings.batch_variation and settings.shard_size < 2 * commit:
            log.warning(
                "batches do not vary: a commit takes a whole shard of %d samples; start the run with shard_size %d or more",
                settings.shard_size, 4 * commit,
            )  # fmt: skip
        self._samples, self._batch_size, self._fingerprint = samples, batch_size, fingerprint
        return self

    def __iter__(self) -> Iterator[list[int]]:
        return self._pass(by_item=False)

    def items(self) -> Iterator[int]:
        """Iterates over sample indices, one at a time, each of which the loop may make any number of commits of: see
        `gem_client.torch.ShardSampler.items`."""
        if self.batches_per_step > 1:
            raise InvalidRequest(
                f"batches_per_step={self.batches_per_step} counts the batches of a sampler, not those of an item: leave it "
                "out, and make the last step of each item before you ask for the next one"
            )
        if (size := self._member.hyperparameters.shard_size) > 1 and not self._passes:
            log.warning(
                "each worker takes %d items at a time, and if it dies all of these come again: start the run with shard_size 1",
                size,
            )
        self._hand.loader_tells()
        for (index,) in self._pass(by_item=True):
            self.deliver()
            yield index
            self._finish_item()

    def _pass(self, by_item: bool) -> Iterator[list[int]]:
        number = self._begin_pass(by_item)
        while self._steps_left and not self._must_report:
            batch = self._hand_out()
            if batch is not None:
                yield batch.indices
                if number != self._passes:
                    return  # another pass has begun
            elif self._epoch_is_over or not self._get_shard():
                break
        with self._lock:
            self._hand.ended = True
        steps = self._member.hyperparameters.steps
        self.complete = self.complete or bool(steps and self._member.steps_done >= steps)

    @property
    def batches_per_commit(self) -> int:
        """Number of batches that one commit covers: those of one step, times the run's local steps."""
        return self.batches_per_step * max(1, self._member.hyperparameters.local_steps)

    @property
    def most_batches(self) -> int | None:
        """Upper bound of the batches that this worker can still get, if none comes twice and all are whole: of one epoch
        between `next_epoch` and `end_epochs`, else of the run. None if there is no limit. Other workers get some of them,
        unless each worker has its own shards."""
        settings, batch = self._member.hyperparameters, self._whole_batch
        limits = []
        if settings.steps:
            limits.append(max(0, settings.steps - self._member.steps_done) * self.batches_per_commit)
        epochs = settings.epochs if self._epoch is None else 1
        if epochs:
            whole, rest = divmod(self._samples, settings.shard_size)
            limits.append(epochs * (whole * -(-settings.shard_size // batch) + -(-rest // batch)))
        return min(limits, default=None)

    @property
    def batch_share(self) -> float:
        """The share of a whole batch that the next gradient should have: 1 unless the last commit's result asked for less."""
        return self._member.links.leader.batch_share if self._cuts else 1.0

    @property
    def samples_in_hand(self) -> int:
        """Samples of the youngest batch that the loop has; 0 if it has none, or if that is not known."""
        with self._lock:
            known = self._hand.known
            return known[-1].samples if known else 0

    @property
    def in_hand(self) -> int:
        """Batches that the loop has and that no commit and no skip covers yet; 0 if that is not known."""
        with self._lock:
            return len(self._hand.known)

    # -- what becomes of batches

    def add_to_window(self, batches: int) -> None:
        """The loop made a local step with `batches` batches: the next commit covers them too."""
        self._window += self._claim(batches)
        self._steps_wait = True

    def claim(self, batches: int | None) -> list[Batch]:
        """Returns the batches that the next commit covers: those of its local steps, and `batches` more that the loop has
        (None: those of one step). Call `committed` or `lost` with them afterwards."""
        claimed = [*self._window, *self._claim(self.batches_per_step if batches is None else batches)]
        self._window, self._steps_wait = [], False
        return claimed

    def share_of(self, claimed: Sequence[Batch], share: float | None) -> float:
        """The share of a whole batch that a commit of these batches has, for its header, or `share` if the loop says it; 0 if
        it counts as a whole one. Logs once that a loop with batches of its own does not cut them."""
        if not self._cuts:
            return 0.0
        if share is not None:
            return share
        if not self._batch_size and self.batch_share < 1 and not self._told_of_whole_batches:
            self._told_of_whole_batches = True
            log.info(
                "this loop's batches stay whole, although the server asks for the share %g of them: to follow it, ask "
                "session.batch_share and tell each commit its share",
                self.batch_share,
            )
        whole = self._whole_batch * max(self.batches_per_step, len(claimed))
        return sum(batch.samples for batch in claimed) / whole if claimed else 0.0

    def committed(self, claimed: Sequence[Batch]) -> None:
        """The commit of these batches was applied, or rejected for its content; they are done in either case."""
        with self._lock:
            self._claimed -= len(claimed)
            self._settle(claimed)

    def lost(self, claimed: Sequence[Batch]) -> None:
        """The commit of these batches was lost, or its outcome is unknown. They come again, unless their lease has ended."""
        with self._lock:
            self._claimed -= len(claimed)
            self._due.extend(claimed)
            self._item_lost = True

    def skip(self, batches: int) -> None:
        """Leaves the youngest `batches` batches out of the run. Raises InvalidRequest if the loop has fewer."""
        if not self._batch_size:
            raise InvalidRequest("no batch can be skipped: this session has no sampler. Make one first")
        with self._lock:
            if not self._by_item:  # else it is a batch of the loop's own: the rest of the item goes on
                self._settle(self._hand.skip(batches))
            self.skipped += batches

    def loader_tells(self) -> None:
        """Announces that the next pass belongs to a loader that calls `deliver`."""
        self._hand.loader_tells()

    def deliver(self) -> None:
        """The loader calls this when it gives the loop the next batch."""
        with self._lock:
            self._hand.deliver()

    # -- epochs

    def next_epoch(self) -> int | None:
        """The epoch, from 0, of the batches that are handed out next, and no later ones: the run's, as far as it was dealt when
        this worker asked. Waits for a shard. It is the epoch of before if batches of it got no step: they come again. None if
        the run is complete, or this worker has done its steps."""
        while not self.complete and self._steps_left:  # in this order: a worker that has left knows no steps
            if epochs := self._due_epochs:
                self._epoch = max(epochs)
                return self._epoch
            if not self._get_shard() and not self.complete:
                self._epoch = max((shard.epoch for shard in self._held.values()), default=self._epoch)
                return self._epoch
        return None

    def end_epochs(self) -> None:
        """Has batches of any epoch handed out from now on."""
        self._epoch = None

    @property
    def goes_on(self) -> bool:
        """Whether another pass may have more batches of this epoch, without a step of the loop before it."""
        return self._steps_left and not (self.complete or self._epoch_is_over or self._waits_for_step)

    @property
    def is_over(self) -> bool:
        """Whether the run is complete, or this worker has done its steps, and no batch waits for a step or a commit."""
        return self.complete and not (self._waits_for_step or self._claimed)

    @property
    def _waits_for_step(self) -> bool:
        return bool(self._hand or self._window)

    @property
    def _due_epochs(self) -> list[int]:
        """The epochs of the batches that are due and still this worker's, in their order."""
        with self._lock:
            shards = [due if isinstance(due, HeldShard) else due.shard for due in self._due]
            return [shard.epoch for shard in shards if self._is_held(shard)]

    @property
    def _epoch_is_over(self) -> bool:
        """Whether the next batch that is due belongs to a later epoch."""
        due = self._due_epochs
        return self._epoch is not None and bool(due) and due[0] > self._epoch

    def wait_for_reports(self) -> None:
        """Waits until every shard that was complete is reported."""
        if self._completing is not None:
            self._completing.result()

    # -- batches

    def _claim(self, batches: int) -> list[Batch]:
        """Returns the batches that a step on `batches` batches covers: see `Hand.cover`."""
        with self._lock:
            if not batches or not self._hand or self._by_item:
                return []
            claimed, again = self._hand.cover(batches)
            self._due.extend(again)  # after the others
            self._claimed += len(claimed)
            self._report()
            return claimed

    def _finish_item(self) -> None:
        """The loop has made all steps on its item."""
        self._wait_for_commit()
        with self._lock:
            item = self._hand.skip(1)
            if self._item_lost:
                self._due.extend(item)
            elif self._steps_wait:
                self._window += item
                self._claimed += 1
            else:
                self._settle(item)

    def _begin_pass(self, by_item: bool) -> int:
        """Makes all batches due that no commit covers, and returns the number of the pass."""
        self._wait_for_commit()
        if not self._got_on:
            time.sleep(IDLE_SECONDS)
        self._got_on = False
        with self._lock:
            self._passes += 1
            self._by_item = by_item
            again = self._hand.begin_pass(self._take_back_all)
            self._due.extendleft(reversed(again))
            return self._passes

    def _take_back_all(self) -> list[Batch]:
        """Returns all batches cut from held shards, for a pass that begins if it is unknown which of them were committed."""
        self._due = deque(each for each in self._due if isinstance(each, HeldShard))
        for shard in self._held.values():
            shard.left = len(shard.batches)
        return [batch for shard in self._held.values() for batch in shard.batches]

    @property
    def _steps_left(self) -> bool:
        """Whether this worker still has to make the commit of the next batch."""
        steps = self._member.hyperparameters.steps
        commits_ahead = (len(self._hand) + self._claimed) // self.batches_per_commit
        return not steps or self._member.steps_done + commits_ahead < steps

    @property
    def _must_report(self) -> bool:
        """Whether too many shards wait for the loop to commit what was read ahead: the pass then ends."""
        with self._lock:
            return sum(shard.done for shard in self._held.values()) >= MAX_UNREPORTED

    def _ask(self) -> Future[LeasedShard]:
        # Shards not named here go back: those whose response was lost, and those that the caller gave up.
        with self._lock:
            holding = {shard.shard_id for shard in self._held.values() if shard.generation == self._member.generation}
        self._member.require_usable()
        return self._side.submit(self._lease, holding)

    def _lease(self, holding: Collection[int]) -> LeasedShard:
        return LeasedShard(self._member.lease_shard(self._samples, holding, self._fingerprint), self._member.generation)

    def _next(self) -> LeasedShard:
        """The next shard: the one requested ahead of time, if there is one and its lease is still held."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            leased = ahead.result()
            if leased.response.HasField("shard") and leased.generation == self._member.generation:
                return leased
        return self._ask().result()

    def _get_shard(self) -> bool:
        """Gets the next shard, or waits a while for one. Returns False if the pass ends."""
        response, generation = self._next()
        if response.HasField("complete"):
            self.complete = True
            return False
        if response.HasField("shard"):
            self._waits = 0
            self._hold(response.shard, generation)
        elif self._hand or self._claimed or self._held:
            return False  # the shards that the server waits for are this worker's own: let the caller commit them
        else:
            self._waits += 1
            if self._waits == 1:
                self._member.warn_of_missing_workers()
            elif self._waits == LONG_WAIT:
                self._member.warn_of_last_shards()
            time.sleep(response.wait_seconds)
        return True

    def _hold(self, dealt: pb.Shard, generation: int) -> None:
        """Makes a shard due."""
        shard_id, indices = dealt.shard_id, list(dealt.indices)
        shard = HeldShard(shard_id, generation, dealt.epoch, indices)
        settings = self._member.hyperparameters
        if settings.batch_variation:
            random, together = np.random.default_rng((settings.seed, shard_id)), self.batches_per_commit
            shard.sizes = iter(batch_sizes(len(indices), self._batch_size, settings.batch_variation, random, together))
        with self._lock:
            self._held = {id_: held for id_, held in self._held.items() if held.generation == generation}
            self._held[shard_id] = shard
            if indices:
                self._due.append(shard)

    def _hand_out(self) -> Batch | None:
        """The next batch that is due; None if there is none. With the last one, it requests the next shard."""
        with self._lock:
            batch = self._next_batch()
            if batch is None:
                return None
            self._hand.add(batch)
            self._item_lost = False
            last = not self._due and not self._by_item  # an item may take long: others get the next one meanwhile
        if last and self._ahead is None and self._steps_left and not self._must_report:
            self._ahead = self._ask()  # while the caller computes, so that the next batch need not wait for the network
        return batch

    def _next_batch(self) -> Batch | None:
        """Takes the next batch that is due, or cuts it from a shard."""
        if len(self._hand) % self.batches_per_step == 0:  # it begins a step
            self._share = self.batch_share
        while self._due:
            due = self._due.popleft()
            shard = due if isinstance(due, HeldShard) else due.shard
            if not self._is_held(shard):
                continue  # others train on it
            if self._epoch is not None and shard.epoch > self._epoch:
                self._due.appendleft(due)
                break
            if isinstance(due, Batch):
                return due
            shard.sizes = None if self._by_item else shard.sizes
            batch = shard.cut(self._size(self._share), self._whole_batch)
            if shard.uncut:
                self._due.appendleft(shard)
            return batch
        return None

    def _is_held(self, shard: HeldShard) -> bool:
        return self._held.get(shard.shard_id) is shard and shard.generation == self._member.generation

    @property
    def _cuts(self) -> bool:
        """Whether the run has gradients of parts of whole batches, which count by their share."""
        settings, kind = self._member.hyperparameters, self._member.registration.update_kind
        return settings.smallest_share < 1 and settings.local_steps == 1 and kind != pb.UPDATE_KIND_DELTA

    @property
    def _whole_batch(self) -> int:
        """Samples in a whole batch of this worker."""
        return 1 if self._by_item else max(1, min(self._batch_size, self._member.hyperparameters.shard_size, self._samples))

    def _size(self, share: float) -> int:
        """Samples in a batch with this share of a whole one: two at least, because BatchNorm fails on a single one."""
        return max(min(2, self._whole_batch), round(share * self._whole_batch))

    # -- under the lock

    def _settle(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            batch.shard.left -= 1
            self._got_on = True
        self._report()

    def _report(self) -> None:
        if not self._hand.certain and self._hand:
            return  # the batches committed may be others than those that were counted
        for shard in [shard for shard in self._held.values() if shard.done]:
            # Reported before it is deleted here: otherwise a request for the next shard would give this one back first.
            if shard.generation == self._member.generation:
                lease_id = self._member.registration.lease_id
                self._completing = self._side.submit(self._member.complete_shard, lease_id, shard.shard_id)
            del self._held[shard.shard_id]
