"""The shard ledger: every sample of every epoch, at least once, whatever happens to the workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import SHARD_MODES, Hyperparameters
from gem_server.core import state_machine
from gem_server.core.shards import NoShard, Shard, ShardLedger
from hypothesis import given
from hypothesis import strategies as st
from kit.core import make_core, start

WORKERS = ["ann", "bob", "cy"]


def ledger(mode: str = "partition", epochs: int = 2, shard_size: int = 4) -> ShardLedger:
    return ShardLedger(Hyperparameters(shards=mode, epochs=epochs, shard_size=shard_size))


def take(book: ShardLedger, worker: str, samples: int = 10) -> Shard:
    shard = book.lease(f"lease-{worker}", worker, samples)
    assert isinstance(shard, Shard)
    return shard


def ranges(shards: list[Shard]) -> list[tuple[int, int, int]]:
    return [(shard.epoch, shard.begin, shard.end) for shard in shards]


class Trained:
    """Plays workers against a ledger, and notes which samples of which epoch were trained on."""

    def __init__(self, book: ShardLedger, samples: int) -> None:
        self.book = book
        self.samples = samples
        self.hands: dict[str, list[Shard]] = {worker: [] for worker in WORKERS}
        self.times: Counter[tuple[str, int, int]] = Counter()  # (group, epoch, sample)
        self.completed = 0

    def lease(self, worker: str) -> Shard | NoShard:
        shard = self.book.lease(f"lease-{worker}", worker, self.samples)
        if isinstance(shard, Shard):
            assert all(shard.shard_id != other.shard_id for hand in self.hands.values() for other in hand)
            self.hands[worker].append(shard)
        return shard

    def complete(self, worker: str) -> None:
        if self.hands[worker]:
            shard = self.hands[worker].pop(0)
            self.completed += 1
            assert not self.book.complete("lease-of another", shard.shard_id)
            assert self.book.complete(f"lease-{worker}", shard.shard_id)
            assert not self.book.complete(f"lease-{worker}", shard.shard_id), "a shard is completed once"
            for sample in self.book.indices(shard).tolist():
                self.times[shard.group, shard.epoch, sample] += 1

    def leave(self, worker: str) -> None:
        lost, self.hands[worker] = self.hands[worker], []
        assert self.book.release(f"lease-{worker}") == len(lost)
        for shard in lost:
            assert not self.book.complete(f"lease-{worker}", shard.shard_id), "a returned shard is not its old holder's"

    def restart(self) -> None:
        """The server comes back from a checkpoint taken just now."""
        settings = self.book._settings
        state = self.book.state()
        self.book = ShardLedger(settings)
        self.book.restore(state)
        again = self.book.state()
        assert again.next_id >= state.next_id
        assert replace(again, next_id=state.next_id) == state

    def finish(self, workers: list[str]) -> None:
        """Trains whatever is left, worker by worker in turn."""
        for _ in range(1000):
            if all(self.finished(worker) for worker in workers):
                return
            for worker in WORKERS:
                self.complete(worker)
        raise AssertionError("the run never completes")

    def finished(self, worker: str) -> bool:
        answer = self.lease(worker)
        return isinstance(answer, NoShard) and answer.complete


@pytest.mark.parametrize("mode", SHARD_MODES)
@given(
    samples=st.integers(1, 23),
    shard_size=st.integers(1, 9),
    epochs=st.integers(1, 3),
    actions=st.lists(
        st.tuples(st.sampled_from(["lease", "lease", "complete", "leave", "restart"]), st.sampled_from(WORKERS)), max_size=40
    ),
)
def test_every_sample_of_every_epoch_is_trained_on_whatever_workers_do(
    mode: str, samples: int, shard_size: int, epochs: int, actions: list[tuple[str, str]]
) -> None:
    run = Trained(ledger(mode, epochs, shard_size), samples)
    for action, worker in actions:
        if action == "restart":
            run.restart()
        else:
            getattr(run, action)(worker)
        assert len(run.book.held) == sum(map(len, run.hands.values()))
        assert run.book.completed == run.completed
    run.finish(WORKERS)
    groups = WORKERS if mode == "replicate" else [""]
    expected = {(group, epoch, sample) for group in groups for epoch in range(epochs) for sample in range(samples)}
    assert set(run.times) == expected
    assert set(run.times.values()) == {1}, "a shard that was never completed does not count, one that was counts once"
    assert run.book.complete_for(WORKERS)
    assert (run.book.pending, len(run.book.held)) == (0, 0)
    assert run.book.samples_completed == len(expected)


# -- one behaviour each


def test_ids_given_out_after_a_checkpoint_do_not_come_again() -> None:
    """A worker that completes such a shard after the restart must not complete another one by accident."""
    book = ledger(epochs=0)
    state = book.state()
    lost = {take(book, "ann").shard_id for _ in range(100)}
    restored = ledger(epochs=0)
    restored.restore(state)
    restored.number_anew(1)
    assert not lost & {take(restored, "ann").shard_id for _ in range(100)}
    assert not any(restored.complete("lease-ann", shard_id) for shard_id in lost)


def test_without_a_number_of_epochs_there_is_no_end() -> None:
    book = ledger(epochs=0, shard_size=10)
    assert [take(book, "ann").epoch for _ in range(50)] == list(range(50))
    assert not book.complete_for(WORKERS)


def test_each_epoch_and_each_replica_has_an_order_of_its_own() -> None:
    book = ledger("replicate", epochs=2, shard_size=10)
    orders = [book.indices(take(book, worker)).tolist() for worker in ("ann", "ann", "bob")]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(10)) for order in orders)


@pytest.mark.parametrize("samples", [0, -1])
def test_an_empty_data_set_is_refused(samples: int) -> None:
    with pytest.raises(InvalidRequest, match="no samples"):
        ledger().lease("lease-ann", "ann", samples)


def test_counts_say_what_is_pending_held_and_done() -> None:
    book = ledger()
    assert (book.pending, book.epoch, book.complete_for(WORKERS)) == (0, 0, False)
    first = take(book, "ann")
    take(book, "bob")
    assert (book.pending, book.held_by_lease()) == (1, {"lease-ann": 1, "lease-bob": 1})
    book.complete("lease-ann", first.shard_id)
    book.release("lease-bob")
    assert (book.pending, book.held_by_lease(), book.completed) == (2, {}, 1)


def test_a_resumed_run_may_go_on_for_more_epochs() -> None:
    book = ledger(epochs=1, shard_size=10)
    book.complete("lease-ann", take(book, "ann").shard_id)
    assert book.complete_for(WORKERS)
    longer = ledger(epochs=2, shard_size=10)
    longer.restore(book.state())
    assert not longer.complete_for(WORKERS)
    assert ranges([take(longer, "ann")]) == [(1, 0, 10)]


def test_a_resumed_run_may_end_earlier() -> None:
    book = ledger(epochs=3, shard_size=10)
    for _ in range(2):
        book.complete("lease-ann", take(book, "ann").shard_id)
    shorter = ledger(epochs=1, shard_size=10)
    shorter.restore(book.state())
    assert shorter.complete_for([]), "before a worker asks, too"
    assert shorter.epoch == 0, "the only one"
    assert shorter.lease("lease-ann", "ann", 10) == NoShard(complete=True)


def test_a_worker_that_holds_too_many_shards_gets_no_more_and_keeps_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "MAX_SHARDS", 2)
    core = make_core(Hyperparameters(shard_size=1))
    (ann,) = start(core)
    held: set[int] = set()
    for _ in range(2):
        shard = core.lease_shard(ann, 10, 0.0, held)
        assert isinstance(shard, Shard)
        held.add(shard.shard_id)
    with pytest.raises(InvalidRequest, match="holds 2 shards already"):
        core.lease_shard(ann, 10, 0.0, held)
    assert core.ledger.held_of(ann, held) == held


def test_a_replica_whose_worker_has_gone_does_not_keep_the_run_open() -> None:
    book = ledger("replicate", epochs=1, shard_size=10)
    book.complete("lease-ann", take(book, "ann").shard_id)
    take(book, "bob")
    assert not book.complete_for({"ann", "bob"})
    book.release("lease-bob")
    assert book.complete_for({"ann"})
    assert not book.complete_for({"ann", "bob"})  # bob is back


def test_a_run_whose_workers_have_all_gone_is_not_complete() -> None:
    for mode in SHARD_MODES:
        book = ledger(mode)
        take(book, "ann")
        book.release("lease-ann")
        assert not book.complete_for(set())
