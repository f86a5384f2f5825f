"""Shards of samples through the SDK's sampler: which worker trains on which samples, and what the ledger records."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, NonFiniteGradient, Session, TransportError, connect
from gem_client import shards as shards_module
from gem_client.shards import IDLE_SECONDS, Shards
from gem_client.torch import Loader, Optimizer, ShardSampler
from live import DEADLINE, Live, config, serving, wait_until
from session_helpers import SIZE, Array, Patience, ended, expire_all, expire_but, in_background, model, theta, workers
from torch import nn
from torch.utils.data import DataLoader, Dataset

ZERO: Array = np.zeros(SIZE, np.float32)
SAMPLES = 23  # three shards of 10, 10 and 3; batches of 4, 4 and 2, of 4, 4 and 2, and of 3


def settings(**changes: Any) -> Hyperparameters:
    return Hyperparameters(**{"batch_size": 4, "shard_size": 10, "epochs": 1, "seed": 3, **changes})


@contextmanager
def joined(live: Live, name: str) -> Iterator[Session]:
    patience = Patience()
    with connect(live.address, name=name, retry=patience.retry()) as session:
        session.join(model())
        yield session
        patience.run_out()


def train_all(session: Session, batches: Iterable[list[int]]) -> Counter[int]:
    """Commits each batch; returns how often each sample was part of a commit that was applied."""
    seen: Counter[int] = Counter()
    for batch in batches:
        if not session.commit(ZERO).dropped:
            seen.update(batch)
    return seen


def ledger(live: Live) -> dict[str, int]:
    """The ledger's counts."""

    def look() -> dict[str, int]:
        ledger = live.core.ledger
        return {
            "pending": ledger.pending,
            "leased": len(ledger.held),
            "completed": ledger.completed,
            "samples_completed": ledger.samples_completed,
            "samples_committed": live.core.samples_committed,
        }

    return live.on_loop(look)


class Numbers(Dataset[int]):
    """The numbers from 0: sample k is k."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


# -- one worker


@pytest.mark.parametrize("mode", ["partition", "replicate"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_one_worker_sees_every_sample_of_every_epoch_once(mode: str, epochs: int) -> None:
    with serving(config(settings(epochs=epochs, shards=mode))) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session)
        data = Numbers(SAMPLES)
        seen: list[int] = []
        for batch in DataLoader(data, batch_sampler=ShardSampler(session, data)):
            seen += batch.tolist()
            parameter.grad = torch.zeros(3)
            optimizer.step()
        for epoch in range(epochs):
            assert sorted(seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
        assert ledger(live) == {
            "pending": 0,
            "leased": 0,
            "completed": 3 * epochs,
            "samples_completed": SAMPLES * epochs,
            "samples_committed": SAMPLES * epochs,
        }
        assert live.on_loop(lambda: live.core.ledger.all_complete)


def test_each_epoch_has_an_order_of_its_own() -> None:
    with serving(config(settings(epochs=2))) as live, joined(live, "a") as session:
        seen = [sample for batch in train_each(session, session.shards(SAMPLES)) for sample in batch]
    assert seen[:SAMPLES] != seen[SAMPLES:]
    assert seen[:SAMPLES] != list(range(SAMPLES))


def train_each(session: Session, batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """The batches, each committed after it was looked at."""
    for batch in batches:
        yield batch
        session.commit(ZERO)


def test_batches_never_straddle_shards() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        sizes = [len(batch) for batch in train_each(session, session.shards(SAMPLES))]
    assert sizes == [4, 4, 2, 4, 4, 2, 3]


def test_the_batch_size_may_be_the_workers_own() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        sizes = [len(batch) for batch in train_each(session, session.shards(SAMPLES, batch_size=7))]
    assert sizes == [7, 3, 7, 3, 3]


def test_large_batches_are_not_cut_short_by_the_default_shard_size() -> None:
    with serving(config(Hyperparameters(batch_size=512))) as live, joined(live, "a") as session:
        assert [len(batch) for batch in train_each(session, session.shards(2048))] == [512] * 4


def test_the_loader_ends_when_the_workers_steps_are_done() -> None:
    with serving(config(settings(steps=5, epochs=0))) as live:
        with joined(live, "a") as session:
            assert sum(train_all(session, session.shards(SAMPLES)).values()) == 4 + 4 + 2 + 4 + 4
            assert session.steps_done == 5
            assert list(Shards(session, SAMPLES, 4)) == []
        with joined(live, "a") as back:
            assert list(back.shards(SAMPLES)) == []
        with joined(live, "b") as other:
            assert len(list(train_each(other, other.shards(SAMPLES)))) == 5


def test_steps_count_from_where_the_worker_left_off() -> None:
    with serving(config(settings(steps=5, epochs=0))) as live:
        with joined(live, "a") as session:
            session.commit(ZERO)
            session.commit(ZERO)
        with joined(live, "a") as back:
            assert len(list(train_each(back, back.shards(SAMPLES)))) == 3


def test_a_shard_is_complete_only_when_its_last_batch_is_committed() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
        held = []
        for _ in range(3):
            next(batches)
            held.append(ledger(live)["completed"])
            session.commit(ZERO)
        assert held == [0, 0, 0]
        wait_until(lambda: ledger(live)["completed"] == 1, "the shard to be complete")
        assert ledger(live)["samples_committed"] == 10


def test_a_loader_may_read_ahead_of_the_commits() -> None:
    with serving(config(settings(epochs=2))) as live, joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
        ahead = [next(batches) for _ in range(5)]
        assert ledger(live)["completed"] == 0
        for _ in ahead:
            session.commit(ZERO)
        wait_until(lambda: ledger(live)["completed"] == 1, "the first shard to be complete")
        assert ledger(live) | {"pending": None, "leased": None} == {
            "pending": None,
            "leased": None,
            "completed": 1,
            "samples_completed": 10,
            "samples_committed": 18,
        }


def read_ahead(batches: Iterable[list[int]], depth: int) -> Iterator[list[int]]:
    """The batches, each fetched `depth` batches before it is handed on, as a loader with worker processes does."""
    iterator = iter(batches)
    fetched: deque[list[int]] = deque()
    more = True
    while more or fetched:
        while more and len(fetched) <= depth:
            batch = next(iterator, None)
            more = batch is not None
            if batch is not None:
                fetched.append(batch)
        if fetched:
            yield fetched.popleft()


def run_to_its_end(work: Any) -> Any:
    """Result of `work`, which must come to an end."""
    return in_background(work).result(DEADLINE)


def test_a_loader_that_reads_ahead_comes_to_the_end_of_the_run() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        seen = run_to_its_end(lambda: train_all(session, read_ahead(session.shards(SAMPLES), depth=2)))
        assert seen == Counter(range(SAMPLES))
        wait_until(lambda: ledger(live)["samples_completed"] == SAMPLES, "every sample to be accounted for")


def test_accumulation_over_an_odd_number_of_batches_comes_to_the_end_of_the_run() -> None:
    def train(session: Session) -> int:
        steps = 0
        for number, _ in enumerate(session.shards(SAMPLES), start=1):
            if number % 2 == 0:
                session.commit(ZERO, batches=2)
                steps += 1
        return steps

    with serving(config(settings())) as live, joined(live, "a") as session:
        assert run_to_its_end(lambda: train(session)) >= 3


def test_a_batch_whose_gradient_was_refused_does_not_keep_the_run_from_its_end() -> None:
    def train(session: Session) -> int:
        refused = 0
        for number, _ in enumerate(session.shards(SAMPLES)):
            try:
                session.commit(np.full(SIZE, np.nan if number == 1 else 0.0, np.float32))
            except NonFiniteGradient:
                refused += 1
        return refused

    with serving(config(settings())) as live, joined(live, "a") as session:
        assert run_to_its_end(lambda: train(session)) == 1


# -- batches without a commit


LOOPS = {
    "one by one": lambda shards: shards,
    "read ahead": lambda shards: read_ahead(shards, depth=2),
    "loader": lambda shards: Loader(shards, shards),
    "loader that reads ahead": lambda shards: Loader(read_ahead(shards, depth=2), shards),  # type: ignore[arg-type]
}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


def train_to_the_end(session: Session, loop: Any, leave_out: Any) -> Counter[int]:
    """Pass after pass; how often each sample was trained on. `leave_out` says which batches get no commit, or ends a pass."""
    shards, seen, number = session.shards(SAMPLES), Counter[int](), 0
    while not shards.complete:
        for batch in loop(shards):
            number += 1
            match leave_out(number):
                case "continue":
                    continue
                case "break":
                    break
            if not session.commit(ZERO).dropped:
                seen.update(batch)
    return seen


@each_loop
@pytest.mark.parametrize("leaving", ["continue", "break"])
@pytest.mark.parametrize("numbers", [{1}, {2, 5}, {7}], ids=["first", "middle", "last"])
def test_a_batch_that_got_no_commit_is_trained_on_before_the_run_is_complete(
    loop: Any, leaving: str, numbers: set[int]
) -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        seen = run_to_its_end(lambda: train_to_the_end(session, loop, lambda number: leaving if number in numbers else ""))
        assert set(seen) == set(range(SAMPLES))
        assert ledger(live)["samples_completed"] == SAMPLES


def test_a_loop_that_reads_ahead_reports_its_shards_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MAX_UNREPORTED", 2)
    with serving(config(settings(epochs=3))) as live, joined(live, "a") as session:
        leased: list[int] = []
        watch = lambda number: leased.append(ledger(live)["leased"])  # noqa: E731
        seen = run_to_its_end(lambda: train_to_the_end(session, LOOPS["read ahead"], watch))
        assert seen == Counter(dict.fromkeys(range(SAMPLES), 3))
        assert max(leased) < 9  # all that there are


@each_loop
def test_a_batch_that_is_skipped_is_left_out_and_the_run_comes_to_its_end_in_one_pass(loop: Any) -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        shards, seen, left_out = session.shards(SAMPLES), Counter[int](), []
        for number, batch in enumerate(loop(shards)):
            if number in (0, 3, 6):
                session.skip()
                left_out += batch
            else:
                session.commit(ZERO)
                seen.update(batch)
        list(shards)
        assert shards.complete
        assert seen + Counter(left_out) == Counter(range(SAMPLES))
        assert session.skipped == 3
        with pytest.raises(InvalidRequest, match="in hand"):
            session.skip()


def test_a_loop_that_commits_nothing_does_not_spin(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with joined(live, "a") as session:
        shards = session.shards(SAMPLES)
        monkeypatch.setattr("gem_client.shards.time.sleep", pauses.append)
        for _ in range(4):
            assert sum(map(len, shards)) == SAMPLES  # all of it, again and again
        assert pauses == [IDLE_SECONDS] * 3
        assert ledger(live)["completed"] == 0


def test_a_commit_of_which_nobody_knows_whether_it_arrived_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller catches the error and goes on, with the batch after that."""
    with serving(config(settings())) as live, joined(live, "a") as session:
        shards, seen = session.shards(SAMPLES), Counter[int]()
        send, calls = session._sender.send, []

        def lose_the_second_answer(*arguments: Any) -> Any:
            result = send(*arguments)
            calls.append(arguments)
            if len(calls) == 2:
                raise TransportError("lost")
            return result

        monkeypatch.setattr(session._sender, "send", lose_the_second_answer)

        def train() -> None:
            while not shards.complete:
                for batch in shards:
                    try:
                        answer = session.commit(ZERO)
                    except TransportError:
                        continue
                    seen.update(() if answer.dropped else batch)

        run_to_its_end(train)
        assert set(seen) == set(range(SAMPLES))
        assert ledger(live)["samples_completed"] == SAMPLES


def test_a_batch_left_out_of_a_window_of_local_steps_is_trained_on() -> None:
    with serving(config(settings(rule="agn", local_steps=3))) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session)
        sampler, seen, number = ShardSampler(session, Numbers(SAMPLES)), Counter[int](), 0

        def train() -> None:
            nonlocal number
            while not sampler.complete:
                for batch in sampler.loader():
                    number += 1
                    if number != 2:
                        parameter.grad = torch.zeros(3)
                        optimizer.step()
                        seen.update(batch.tolist())
                optimizer.finish()

        run_to_its_end(train)
        assert set(seen) == set(range(SAMPLES))
        assert ledger(live)["samples_completed"] == SAMPLES


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "GradScaler"])
def test_finish_makes_a_step_of_what_is_left_of_an_accumulation(scaled: bool) -> None:
    """7 batches are no multiple of 2. Gradients that a GradScaler has scaled are not committed, and their batch goes back."""
    with serving(config(settings())) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session, batches_per_step=2)
        sampler = ShardSampler(session, Numbers(SAMPLES))
        scaler = torch.amp.GradScaler("cpu")
        for number, _ in enumerate(sampler.loader(), start=1):
            loss = parameter.sum()
            (scaler.scale(loss) if scaled else loss).backward()
            if number % 2 == 0:
                scaler.step(optimizer) if scaled else optimizer.step()
                scaler.update() if scaled else None
                optimizer.zero_grad()
        optimizer.finish()
        optimizer.finish()
        wait_until(lambda: ledger(live)["completed"] == (2 if scaled else 3), "the shards to be complete")
        assert ledger(live)["samples_committed"] == (20 if scaled else 23)
        assert session.steps_done == (3 if scaled else 4)


# -- how many batches there are


def test_the_length_of_a_loader_is_what_this_worker_can_get_at_most() -> None:
    with serving(config(settings(epochs=2))) as live, joined(live, "a") as session:
        sampler = ShardSampler(session, Numbers(SAMPLES))
        assert len(sampler.loader()) == len(DataLoader(Numbers(SAMPLES), batch_sampler=sampler)) == 14
        assert len(list(train_each(session, sampler))) == 14
    with serving(config(settings(epochs=0, steps=5))) as live, joined(live, "a") as session:
        session.commit(ZERO)
        assert len(ShardSampler(session, Numbers(SAMPLES))) == 4
    with serving(config(settings(epochs=0, steps=1))) as live, joined(live, "a") as session:
        endless = ShardSampler(session, Numbers(SAMPLES))
        session._member.registration.hyperparameters.steps = 0
        with pytest.raises(TypeError, match="neither epochs nor steps"):
            len(endless)


# -- several workers


def test_the_final_model_is_the_same_for_every_worker_and_has_all_commits_in_it() -> None:
    parameter = nn.Parameter(torch.zeros(SIZE))

    def train(session: Session) -> Array:
        optimizer = Optimizer([("w", parameter)], session)
        sampler = ShardSampler(session, Numbers(SAMPLES))
        for _ in sampler.loader():
            parameter.grad = torch.ones(SIZE)
            optimizer.step()
            if session.steps_done == 4:
                break
        optimizer.load_final()
        return parameter.detach().numpy().copy()

    patience = Patience()
    with serving(config(settings())) as live, connect(live.address, name="slow") as slow:
        slow.join({"w": np.zeros(SIZE, np.float32)})
        batches = iter(slow.shards(SAMPLES))
        next(batches)
        with connect(live.address, name="fast", retry=patience.retry()) as fast:
            loaded = in_background(lambda: train(fast))
            wait_until(lambda: workers(live) == ["slow"] and patience.pauses, "the worker that is done to leave, and to wait")
            assert not loaded.done()
            slow.commit(np.ones(SIZE, np.float32))
            train_all(slow, batches)
            np.testing.assert_array_equal(loaded.result(DEADLINE), theta(live))
            np.testing.assert_array_equal(slow.pull_final(), theta(live))
        assert live.on_loop(lambda: live.core.ledger.all_complete)
        patience.run_out()


def test_two_workers_in_turn_split_an_epoch() -> None:
    with serving(config(settings())) as live, joined(live, "a") as first, joined(live, "b") as second:
        turns = [(first, iter(first.shards(SAMPLES))), (second, iter(second.shards(SAMPLES)))]
        seen: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}

        def train_one(session: Session, batches: Iterator[list[int]]) -> None:
            seen[session.name].update(next(batches))
            session.commit(ZERO)

        for _ in range(2):
            for turn in turns:
                train_one(*turn)
        train_one(*turns[0])  # its shard's last batch: the last shard is asked for ahead, on the side
        wait_until(lambda: ledger(live)["pending"] == 0, "the last shard to be leased")
        train_one(*turns[1])
        assert sum(seen["a"].values()) == sum(seen["b"].values()) == 10
        seen["a"].update(train_all(first, turns[0][1]))
        assert seen["a"] + seen["b"] == Counter(range(SAMPLES))
        assert next(turns[1][1], None) is None


def test_replicate_shows_each_worker_every_sample_in_an_order_of_its_own() -> None:
    with serving(config(settings(shards="replicate"))) as live:
        orders = []
        for name in ("a", "b"):
            with joined(live, name) as session:
                orders.append([sample for batch in train_each(session, session.shards(SAMPLES)) for sample in batch])
        assert [Counter(order) for order in orders] == [Counter(range(SAMPLES))] * 2
        assert orders[0] != orders[1]
        assert ledger(live)["samples_completed"] == 2 * SAMPLES


def test_the_shards_of_a_worker_that_dies_are_trained_on_by_the_others() -> None:
    with serving(config(settings(epochs=2))) as live, joined(live, "dies") as dying, joined(live, "lives") as living:
        batches = iter(dying.shards(SAMPLES))
        lost = next(batches)
        dying.commit(ZERO)
        rest = iter(living.shards(SAMPLES))
        seen = Counter(lost)
        seen.update(next(rest))
        expire_but(live, lambda: living.commit(ZERO))
        seen.update(train_all(living, rest))
        assert set(seen) == set(range(SAMPLES))
        assert all(count >= 2 for count in seen.values())
        assert ended(live) == {"expired": 1}
        assert ledger(live) == {
            "pending": 0,
            "leased": 0,
            "completed": 6,
            "samples_completed": 2 * SAMPLES,
            "samples_committed": 2 * SAMPLES + len(lost),
        }


def test_a_worker_waits_while_others_hold_the_last_shards_and_gets_what_comes_back() -> None:
    with serving(config(settings(shard_size=100))) as live, joined(live, "holds") as holding, joined(live, "waits") as waiting:
        next(iter(holding.shards(SAMPLES)))
        seen = in_background(lambda: train_all(waiting, waiting.shards(SAMPLES)))
        assert not seen.done()
        holding.close()
        assert seen.result(DEADLINE) == Counter(range(SAMPLES))


def test_a_worker_that_loses_its_lease_in_mid_shard_drops_the_batch_and_the_rest_of_the_shard_comes_back() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
        seen = Counter(next(batches))
        session.commit(ZERO)
        dropped = next(batches)
        expire_all(live)
        assert session.commit(ZERO).dropped
        seen.update(train_all(session, batches))
        assert set(seen) == set(range(SAMPLES))
        assert all(seen[sample] >= 1 for sample in dropped)
        counts = ledger(live)
        assert (counts["samples_completed"], counts["samples_committed"]) == (SAMPLES, SAMPLES + 4)


def test_a_batch_of_the_next_lease_that_is_dropped_with_the_last_gradient_is_trained_on_again() -> None:
    """Asking for a shard found the lease gone: the batch in hand is of the new one, the θ it is computed on is not."""
    with serving(config(settings())) as live, joined(live, "a") as session:
        shards = session.shards(SAMPLES)
        expire_all(live)
        batches = iter(shards)
        next(batches)
        assert session.commit(ZERO).dropped
        assert set(train_all(session, batches)) == set(range(SAMPLES))
        assert ledger(live)["samples_completed"] == SAMPLES


def test_a_shard_whose_lease_ended_before_its_completion_is_not_complete() -> None:
    with serving(config(settings())) as live, joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
        for _ in range(2):
            next(batches)
            session.commit(ZERO)
        next(batches)
        wait_until(lambda: ledger(live)["leased"] == 2, "the next shard, which is asked for ahead of time")
        expire_all(live)
        assert session.commit(ZERO).dropped
        assert ledger(live)["completed"] == 0
        assert sum(train_all(session, batches).values()) == SAMPLES


def test_the_sampler_goes_on_after_a_server_lost_everything() -> None:
    patience = Patience()
    with serving(config(settings())) as live:
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        batches = iter(session.shards(SAMPLES))
        next(batches)
        session.commit(ZERO)
        live.stop()
        with serving(config(settings(), listen=live.address)) as back, session:
            next(batches)
            assert session.commit(ZERO).dropped
            assert train_all(session, batches) == Counter(range(SAMPLES))
            assert ledger(back)["samples_completed"] == SAMPLES


# -- what is refused


def test_a_data_set_of_another_size_is_refused() -> None:
    with serving(config(settings())) as live, joined(live, "a") as first, joined(live, "b") as second:
        next(iter(first.shards(SAMPLES)))
        with pytest.raises(InvalidRequest, match=f"24 samples.*{SAMPLES}"):
            next(iter(second.shards(SAMPLES + 1)))


def test_an_empty_data_set_is_refused(live: Live) -> None:
    with joined(live, "a") as session, pytest.raises(InvalidRequest, match="no samples"):
        next(iter(session.shards(0)))


def test_a_session_hands_out_shards_once(live: Live) -> None:
    with joined(live, "a") as session:
        session.shards(SAMPLES)
        with pytest.raises(InvalidRequest, match="already"):
            session.shards(SAMPLES)


def test_shards_need_a_run(live: Live) -> None:
    with connect(live.address) as session, pytest.raises(InvalidRequest, match="join"):
        session.shards(SAMPLES)


def test_shards_end_with_their_session(live: Live) -> None:
    with joined(live, "a") as session:
        batches = iter(session.shards(SAMPLES))
    with pytest.raises(InvalidRequest, match="closed"):
        run_to_its_end(lambda: next(batches))
