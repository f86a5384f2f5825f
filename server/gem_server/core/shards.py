"""The shard ledger: which samples of each epoch are still to be trained on, and which worker holds them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters
from gem_api.schema import Big

from gem_server.core.shuffle import Indices, shuffled

MAX_SHARDS = 1000  # shards that one worker may hold at once
MAX_SAMPLES = 1 << 40  # of a training set; sums over 2²³ epochs still fit the contract's 64 bits
_IDS = 1 << 32  # range of shard ids for each start of the server


@dataclass(frozen=True)
class Shard:
    """Positions [begin, end) of one epoch's order, for the workers that share `group`."""

    shard_id: int
    group: str
    epoch: int
    begin: int
    end: int


@dataclass(frozen=True)
class NoShard:
    """There is no shard at present. If `complete`, there will be none later; otherwise ask again."""

    complete: bool


@dataclass
class Deck:
    """The shards of all epochs, for workers that share them. They are dealt in order; returned shards come first.

    `epochs` 0 means that there is no last epoch.
    """

    samples: int
    shard_size: int
    epochs: int
    epoch: int = 0
    next: int = 0
    returned: deque[tuple[int, int, int]] = field(default_factory=deque)
    held: int = 0

    def deal(self) -> tuple[int, int, int] | None:
        """Deals the next shard as (epoch, begin, end); None if there is none at present."""
        if self.returned:
            self.held += 1
            return self.returned.popleft()
        if self.next >= self.samples:
            self.epoch, self.next = self.epoch + 1, 0
        if self.epochs and self.epoch >= self.epochs:
            self.epoch, self.next = self.epochs - 1, self.samples
            return None
        begin, self.next = self.next, min(self.next + self.shard_size, self.samples)
        self.held += 1
        return self.epoch, begin, self.next

    def give_back(self, shard: Shard) -> None:
        self.held -= 1
        self.returned.append((shard.epoch, shard.begin, shard.end))

    @property
    def pending(self) -> int:
        """Shards of the current epoch that nobody holds."""
        return len(self.returned) + -(-(self.samples - self.next) // self.shard_size)

    @property
    def newest(self) -> int:
        """The newest epoch of which a shard was dealt; the last one, if the run was resumed with fewer epochs."""
        return min(self.epoch, self.epochs - 1) if self.epochs else self.epoch

    @property
    def complete(self) -> bool:
        last = self.epochs - 1
        dealt_out = last >= 0 and (
            self.epoch > last or (self.epoch == last and self.next >= self.samples)
        )  # or resumed with less
        return dealt_out and not self.returned and not self.held


@dataclass(frozen=True)
class LedgerState:
    """A ledger as a checkpoint holds it. A deck is its group, epoch, next sample, and returned shards: (epoch, begin, end). A
    held shard is the id of its lease, and its own fields."""

    samples: Big
    completed: int
    samples_completed: Big
    next_id: int
    decks: list[tuple[str, int, Big, list[tuple[int, Big, Big]]]]
    held: list[tuple[str, int, str, int, Big, Big]]


class ShardLedger:
    """Deals shards to leases and takes them back.

    In `partition` mode all workers share one deck, so that each sample is trained on once per epoch. In `replicate` mode each
    worker name has its own deck. A shard that comes back unfinished is dealt again from its beginning, so every sample of
    every epoch is trained on at least once.
    """

    def __init__(self, settings: Hyperparameters) -> None:
        self._settings = settings
        self.samples = 0  # size of the training set; 0 until the first worker reports it
        self.decks: dict[str, Deck] = {}
        self.held: dict[int, tuple[str, Shard]] = {}
        self.completed = 0
        self.samples_completed = 0
        self._next_id = 1

    def lease(self, lease_id: str, worker: str, samples: int) -> Shard | NoShard:
        """Deals the next shard to a lease.

        Raises:
            InvalidRequest: `samples`, the size of the worker's training set, is not the run's.
        """
        self.require_samples(samples)
        self.samples = samples
        group = worker if self._settings.shards == "replicate" else ""
        deck = self.decks.setdefault(group, self._new_deck())
        dealt = deck.deal()
        if dealt is None:
            return NoShard(deck.complete)
        shard = Shard(self._next_id, group, *dealt)
        self._next_id += 1
        self.held[shard.shard_id] = lease_id, shard
        return shard

    def require_samples(self, samples: int) -> None:
        """Raises InvalidRequest if a worker's training set is empty, or of another size than the run's."""
        if samples < 1:
            raise InvalidRequest("the training set has no samples: give a data set with at least one")
        if samples > MAX_SAMPLES:
            raise InvalidRequest(f"the training set has {samples} samples: at most {MAX_SAMPLES} are allowed")
        if samples != (self.samples or samples):
            raise InvalidRequest(
                f"the training set has {samples} samples, but this run's has {self.samples}: use the same data set"
            )

    def indices(self, shard: Shard) -> Indices:
        """The samples of a shard: uint64, shape (end - begin,)."""
        return shuffled(shard.begin, shard.end, self.samples, self._settings.seed, shard.epoch, shard.group)

    def complete(self, lease_id: str, shard_id: int) -> bool:
        """Marks a shard as completed. Returns False if this lease does not hold it."""
        holder, shard = self.held.get(shard_id, (None, None))
        if shard is None or holder != lease_id:
            return False
        del self.held[shard_id]
        self.decks[shard.group].held -= 1
        self.completed += 1
        self.samples_completed += shard.end - shard.begin
        return True

    def release(self, lease_id: str, but: Collection[int] = ()) -> int:
        """Takes back the shards of a lease, except those in `but`. Returns how many."""
        mine = [shard for holder, shard in self.held.values() if holder == lease_id and shard.shard_id not in but]
        for shard in mine:
            del self.held[shard.shard_id]
            self.decks[shard.group].give_back(shard)
        return len(mine)

    def held_of(self, lease_id: str, shards: Collection[int]) -> set[int]:
        """The subset of the given shards that the lease holds."""
        return {shard for shard in shards if self.held.get(shard, ("", None))[0] == lease_id}

    def held_by_lease(self) -> Counter[str]:
        """The number of shards that each lease holds."""
        return Counter(holder for holder, _ in self.held.values())

    @property
    def epoch(self) -> int:
        """The newest epoch of which a shard was dealt, counted from 0."""
        return max((deck.newest for deck in tuple(self.decks.values())), default=0)

    @property
    def pending(self) -> int:
        return sum(deck.pending for deck in tuple(self.decks.values()))

    def complete_for(self, workers: Collection[str]) -> bool:
        """Whether these workers, all that are in the run, have nothing left to train on.

        In `replicate` mode the deck of a worker that has gone does not count: the worker may never return. At least one deck
        must be complete, as a run whose workers have all died is not."""
        decks = self.decks.copy()  # a scrape of the metrics asks from a thread of its own
        awaited = (deck for group, deck in decks.items() if not group or group in workers)
        return any(deck.complete for deck in decks.values()) and all(deck.complete for deck in awaited)

    def state(self) -> LedgerState:
        """A copy of the ledger."""
        return LedgerState(
            self.samples,
            self.completed,
            self.samples_completed,
            self._next_id,
            [(group, deck.epoch, deck.next, list(deck.returned)) for group, deck in self.decks.items()],
            [(lease_id, s.shard_id, s.group, s.epoch, s.begin, s.end) for lease_id, s in self.held.values()],
        )

    def number_anew(self, number: int) -> None:
        """Takes the ids of all further shards from the range `number`: see `_IDS`."""
        self._next_id = number * _IDS + self._next_id % _IDS

    def restore(self, state: LedgerState) -> None:
        """Restores what `state` returned."""
        self.samples, self.completed, self.samples_completed = state.samples, state.completed, state.samples_completed
        self._next_id = state.next_id
        for group, epoch, next_, returned in state.decks:
            deck = self.decks[group] = self._new_deck()
            deck.epoch, deck.next = epoch, next_
            deck.returned.extend(returned)
        for lease_id, shard_id, group, epoch, begin, end in state.held:
            self.held[shard_id] = lease_id, Shard(shard_id, group, epoch, begin, end)
            self.decks[group].held += 1

    def change(self, settings: Hyperparameters) -> None:
        """Changes the hyper-parameters; of these, only the number of epochs concerns the ledger."""
        self._settings = settings
        for deck in self.decks.values():
            deck.epochs = settings.epochs

    def _new_deck(self) -> Deck:
        return Deck(self.samples, self._settings.shard_size, self._settings.epochs)


def require_windows_fit(settings: Hyperparameters) -> None:
    """Raises ValueError if a worker would have to hold more shards than allowed before its first commit."""
    shards = settings.local_steps // -(-settings.shard_size // settings.batch_size) + 2
    if shards > MAX_SHARDS:
        raise ValueError(
            f"{settings.local_steps} local steps need {shards} shards at once, but a worker may hold only {MAX_SHARDS}: "
            "raise shard_size, or use fewer local steps"
        )
