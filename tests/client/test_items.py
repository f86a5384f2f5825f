"""Items of which a loop makes many steps, such as files of a stream. Each comes again as a whole unless all is committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
import torch
from client.sampler_helpers import ZERO, Numbers, joined, ledger, run_to_its_end, settings
from gem_client import InvalidRequest, Session, TransportError, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.model import expire_all, model, version
from kit.server import DEADLINE, config, serving
from torch import nn

ITEMS, PARTS = 5, 3  # and the commits that each is worth
RUN = settings(batch_size=1, shard_size=1)
EVERY_PART = {(item, part) for item in range(ITEMS) for part in range(PARTS)}


def commit_parts(session: Session, item: int, committed: Counter[tuple[int, int]]) -> Iterator[int]:
    """Commits the parts of an item one by one, and counts those that were applied."""
    for part in range(PARTS):
        if not session.commit(ZERO).lost:
            committed[item, part] += 1
        yield part


def test_an_item_is_complete_when_the_loop_asks_for_the_next_one() -> None:
    with serving(config(RUN)) as live, joined(live, "a") as session:
        shards, committed, completed = session.shards(ITEMS), Counter[tuple[int, int]](), []
        for item in shards.items():
            completed += [ledger(live)["completed"] for _ in commit_parts(session, item, committed)]
            assert ledger(live)["leased"] == 1, "the next one was taken from the others before it was needed"
        assert completed == [number for number in range(ITEMS) for _ in range(PARTS)]
        assert committed == dict.fromkeys(EVERY_PART, 1)
        assert shards.complete
        assert live.on_loop(lambda: live.core.complete)


def test_the_item_of_a_worker_that_dies_comes_again_as_a_whole_and_those_before_it_do_not() -> None:
    """Each of three workers completes an item. The first two die in their second one."""
    with serving(config(RUN)) as live:
        committed = Counter[tuple[int, int]]()
        for name in ("a", "b"):
            with joined(live, name) as session:
                items = session.shards(ITEMS).items()
                for _ in commit_parts(session, next(items), committed):
                    pass
                next(commit_parts(session, next(items), committed))
                expire_all(live)
        assert ledger(live)["completed"] == 2
        with joined(live, "c") as session:
            shards = session.shards(ITEMS)
            for item in shards.items():
                for _ in commit_parts(session, item, committed):
                    pass
        assert set(committed) == EVERY_PART
        assert sorted(committed.values()) == [1] * (ITEMS * PARTS - 2) + [2] * 2, "only what was begun comes twice"


@pytest.mark.parametrize("trouble", ["the lease ends", "an answer is lost"])
def test_an_item_of_which_a_commit_was_lost_comes_again(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config(RUN)) as live, joined(live, "a") as session:
        shards, seen, send, sent = session.shards(ITEMS), list[int](), session._member.commit, []

        def lose_the_last_of_the_first(*arguments: Any) -> Any:
            sent.append(arguments)
            if len(sent) == PARTS and trouble == "the lease ends":
                expire_all(live)
            result = send(*arguments)
            if len(sent) == PARTS and trouble == "an answer is lost":
                raise TransportError("lost")
            return result

        monkeypatch.setattr(session._member, "commit", lose_the_last_of_the_first)

        def train() -> None:
            while not shards.complete:
                for item in shards.items():
                    seen.append(item)
                    for _ in range(PARTS):
                        with suppress(TransportError):
                            session.commit(ZERO)

        run_to_its_end(train)
        assert Counter(seen) == {item: 2 if item == seen[0] else 1 for item in range(ITEMS)}
        assert live.on_loop(lambda: live.core.complete)


def test_an_item_that_the_loop_leaves_early_comes_again_and_skipped_batches_do_not_complete_it() -> None:
    with serving(config(RUN)) as live, joined(live, "a") as session:
        shards, seen = session.shards(ITEMS), list[int]()
        for item in shards.items():
            seen.append(item)
            session.commit(ZERO)
            session.skip()
            if len(seen) == 2:
                break
        assert ledger(live)["completed"] == 1
        for item in shards.items():
            seen.append(item)
            session.commit(ZERO)
        assert Counter(seen) == {item: 2 if item == seen[1] else 1 for item in range(ITEMS)}
        assert session.skipped == 2
        assert shards.complete


@pytest.mark.parametrize("epochs", [1, 2])
def test_local_steps_on_an_item_that_wait_are_committed_before_it_is_complete(epochs: int) -> None:
    """Three steps an item, two a commit: the last step of an item waits for the next one, that of the last for `finish`."""
    with serving(config(settings(batch_size=1, shard_size=1, epochs=epochs, local_steps=2))) as live:
        weight, completed = nn.Parameter(torch.zeros(3)), []
        with connect(live.address) as session:
            optimizer = Optimizer([("w", weight)], session)
            sampler = ShardSampler(session, Numbers(ITEMS))
            for _ in sampler.epochs():
                for _ in sampler.items():
                    for _ in range(PARTS):
                        session._shards.wait_for_reports()
                        completed.append(ledger(live)["completed"])
                        weight.grad = torch.ones(3)
                        optimizer.step()
                optimizer.finish()
            assert session.steps_done == 8 * epochs
        assert completed[:12] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
        assert ledger(live)["completed"] == ITEMS * epochs
        assert live.on_loop(lambda: live.core.complete)


def test_an_item_is_complete_after_the_commit_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first commit takes until somebody waits for it, or counts it."""
    known, awaited = list[bool](), Event()
    with serving(config(RUN)) as live, connect(live.address) as session:
        session.join(model(), overlap=True)
        shards, send = session.shards(ITEMS), session._member.commit
        settle, wait = shards._settle, shards._wait_for_commit

        def settled(batches: Any) -> None:
            if batches:
                known.append(session._under_way is not None and session._under_way.done())
                awaited.set()
            settle(batches)

        def waits() -> None:
            if session._under_way is not None:
                awaited.set()
            wait()

        monkeypatch.setattr(session._member, "commit", lambda commit: awaited.wait(DEADLINE) and send(commit))
        monkeypatch.setattr(shards, "_settle", settled)
        monkeypatch.setattr(shards, "_wait_for_commit", waits)
        for _ in shards.items():
            session.finish_commit()
            session.begin_commit(ZERO)
        session.finish_commit()
        assert known == [True] * ITEMS
        assert version(live) == ITEMS


def test_what_items_cannot_do_is_said(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.zeros(3))
    with serving(config(settings(shard_size=4))) as live, connect(live.address) as session:
        Optimizer([("w", weight)], session, batches_per_step=2)
        with pytest.raises(InvalidRequest, match=r"batches_per_step=2 counts the batches of a sampler.* leave it out"):
            next(ShardSampler(session, Numbers(ITEMS)).items())
    with serving(config(settings(shard_size=4))) as live, joined(live, "a") as session:
        shards = session.shards(ITEMS)
        for _ in range(2):
            assert len(list(shards.items())) in (ITEMS, 0)
        assert [record.message for record in caplog.records if "takes 4 items at a time" in record.message] == [
            "each worker takes 4 items at a time, and if it dies all of these come again: start the run with shard_size 1"
        ]
