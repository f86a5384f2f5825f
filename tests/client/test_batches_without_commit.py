"""A batch that a loop leaves out: trained on later, unless it is skipped or committed with the rest."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from client.sampler_helpers import SAMPLES, ZERO, Numbers, joined, ledger, read_ahead, run_to_its_end, settings, train_all
from gem_client import InvalidRequest, Session, TransportError, connect
from gem_client.run import shards as shards_module
from gem_client.run.shards import IDLE_SECONDS
from gem_client.torch import Loader, Optimizer, ShardSampler
from kit.server import Live, config, serving, wait_until
from torch import nn

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
            if not session.commit(ZERO).lost:
                seen.update(batch)
    return seen


@each_loop
@pytest.mark.parametrize(("leaving", "numbers"), [("continue", {1}), ("break", {2, 5}), ("continue", {7})], ids=str)
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
def test_a_batch_that_is_skipped_is_left_out_and_the_run_ends_in_one_pass(loop: Any) -> None:
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


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_leaves_its_passes_early_trains_on_every_sample_once(name: str) -> None:
    """Shards have three batches, passes two. Of a reader that reads ahead by itself nobody knows what it has trained on."""
    with serving(config(settings())) as live, joined(live, "a") as session:
        shards, seen = session.shards(SAMPLES), Counter[int]()

        def train() -> None:
            while not shards.complete:
                seen.update(train_all(session, islice(LOOPS[name](shards), 2)))  # type: ignore[no-untyped-call]

        if name == "read ahead":
            with pytest.raises(InvalidRequest, match=r"came 3 times and never got a step: .* leave the loader early"):
                run_to_its_end(train)
        else:
            run_to_its_end(train)
            assert seen == Counter(range(SAMPLES))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_accumulates_and_does_not_say_so_is_told(name: str) -> None:
    with serving(config(settings(shard_size=100, epochs=2))) as live, joined(live, "a") as session:
        accumulate = lambda number: "continue" if number % 2 else ""  # noqa: E731
        with pytest.raises(InvalidRequest, match="batches_per_step=k"):
            run_to_its_end(lambda: train_to_the_end(session, LOOPS[name], accumulate))
        assert session.steps_done == (2 if "loader" in name else 18)  # without a loader, after three passes


def test_a_loop_that_commits_nothing_neither_spins_nor_goes_on_for_ever(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with joined(live, "a") as session:
        shards = session.shards(SAMPLES)
        monkeypatch.setattr("gem_client.run.shards.time.sleep", pauses.append)
        for _ in range(3):
            assert sum(map(len, shards)) == SAMPLES  # all of it, again and again
        with pytest.raises(InvalidRequest, match="never got a step"):
            list(shards)
        assert pauses == [IDLE_SECONDS] * 3
        assert ledger(live)["completed"] == 0


def test_a_commit_of_which_nobody_knows_whether_it_arrived_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller catches the error and goes on, with the batch after that."""
    with serving(config(settings())) as live, joined(live, "a") as session:
        shards, seen = session.shards(SAMPLES), Counter[int]()
        send, calls = session._member.commit, []

        def lose_the_second_answer(*arguments: Any) -> Any:
            result = send(*arguments)
            calls.append(arguments)
            if len(calls) == 2:
                raise TransportError("lost")
            return result

        monkeypatch.setattr(session._member, "commit", lose_the_second_answer)

        def train() -> None:
            while not shards.complete:
                for batch in shards:
                    try:
                        answer = session.commit(ZERO)
                    except TransportError:
                        continue
                    seen.update(() if answer.lost else batch)

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
