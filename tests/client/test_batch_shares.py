"""Batches that follow the share that the server asks for: how they are cut, and what each commit says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from client.sampler_helpers import read_ahead, settings
from client.share_helpers import Member, commit, shards_of
from gem_api.v1 import training_pb2 as pb
from gem_client.run import shards as shards_module
from gem_client.run.shards import Shards
from gem_client.torch import Loader
from hypothesis import given
from hypothesis import strategies as st

SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
EVENTS = ("commit", "commit", "commit", "skip", "lose the commit", "lose the lease", "leave the pass")
LOSING = {"lose the commit", "lose the lease", "leave the pass"}


def loader(shards: Shards, ahead: int, tells: bool = True) -> Iterator[list[int]]:
    """A loader that reads `ahead` batches ahead. If it `tells`, the shards know which one the loop has."""
    batches = read_ahead(shards, ahead)
    return iter(Loader(batches, shards)) if tells else batches  # type: ignore[arg-type]


def following(**changes: Any) -> Member:
    return Member(settings(**{"smallest_share": 1 / 16, **changes}))


@given(
    samples=st.integers(1, 70), batch=st.integers(1, 20), shard=st.integers(5, 40), epochs=st.integers(1, 2),
    together=st.integers(1, 3), ahead=st.integers(0, 3), tells=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(SHARES)), max_size=25),
)  # fmt: skip
def test_every_sample_of_every_epoch_is_covered_whatever_the_shares_and_once_if_nothing_is_lost(
    samples: int, batch: int, shard: int, epochs: int, together: int, ahead: int, tells: bool, events: list[tuple[str, float]]
) -> None:
    member = following(batch_size=batch, shard_size=shard, epochs=epochs)
    shards, seen = shards_of(member, samples, together), Counter[int]()
    script, whole, left_early, passes = iter(events), min(batch, shard, samples), 0, 0

    def covers(batches: int | None = None) -> None:
        claimed, share = commit(shards, member, batches)
        mine = [index for each in claimed for index in each.indices]
        seen.update(mine)
        assert not claimed or share == pytest.approx(len(mine) / (whole * together))

    with patch.object(shards_module, "IDLE_SECONDS", 0):
        while not shards.complete:
            had, passes = 0, passes + 1
            assert passes < 100, "the run does not end"
            for indices in loader(shards, ahead, tells):
                assert 1 <= len(indices) <= whole
                had += 1
                if had % together:
                    continue
                event, member.links.leader.batch_share = next(script, ("commit", 0.25))
                match event:
                    case "skip":
                        seen.update(index for each in shards._hand._batches[:together] for index in each.indices)
                        shards.skip(together)
                    case "lose the commit":
                        shards.lost(shards.claim(None))
                    case "leave the pass" if left_early < 2:
                        left_early += 1
                        break
                    case _:
                        if event == "lose the lease":
                            member.lose_lease()
                        covers()
            else:
                if rest := shards.in_hand:
                    covers(rest)
    assert set(seen) == set(range(samples * epochs))
    if not LOSING & {event for event, _ in events}:
        assert set(seen.values()) == {1}
    assert member.ledger.complete_for(["a"])


def test_a_loader_that_reads_nothing_ahead_follows_with_the_next_batch() -> None:
    member = following(batch_size=16, shard_size=32)
    shards, sizes, told = shards_of(member, 64), [], []
    asked = iter([1.0, 0.25, 0.5, 0.5, 0.25, 0.1875])
    for indices in loader(shards, 0):
        sizes.append(len(indices))
        told.append(commit(shards, member)[1])
        member.links.leader.batch_share = next(asked, 1.0)
    assert sizes == [16, 16, 4, 8, 8, 4, 3, 5]  # 27 of the second shard's 32 samples, and what is left
    assert told == [size / 16 for size in sizes]


def test_batches_that_were_read_ahead_keep_their_size_and_their_commits_say_so() -> None:
    member = following(batch_size=16, shard_size=64)
    shards, told = shards_of(member, 128), []
    for _ in loader(shards, 2):
        member.links.leader.batch_share = 0.5
        told.append(commit(shards, member)[1])
    assert told == [1.0, 1.0, 1.0, *[0.5] * 10]


def test_all_batches_of_a_step_have_the_same_share() -> None:
    member = following(batch_size=16, shard_size=256)
    shards, sizes, asked = shards_of(member, 256, batches_per_step=3), [], iter(SHARES * 9)
    for indices in loader(shards, 0):
        member.links.leader.batch_share = next(asked)
        sizes.append(len(indices))
        if len(sizes) % 3 == 0:
            assert commit(shards, member)[1] == pytest.approx(sum(sizes[-3:]) / 48)
    assert sizes[:12] == [16] * 3 + [3] * 3 + [8] * 3 + [2] * 3


def test_a_batch_that_comes_again_keeps_its_size() -> None:
    member = following(batch_size=16, shard_size=64)
    shards, sizes = shards_of(member, 64), []
    for number, indices in enumerate(loader(shards, 0)):
        sizes.append(len(indices))
        if number == 0:
            shards.lost(shards.claim(None))
        else:
            assert commit(shards, member)[1] == len(indices) / 16
        member.links.leader.batch_share = 0.5
    assert sizes == [16, *[8] * 6, 16]


def test_no_sample_is_left_alone_at_the_end_of_a_shard_by_smaller_batches() -> None:
    member = following(batch_size=16, shard_size=16)
    member.links.leader.batch_share = 3 / 16
    shards, sizes = shards_of(member, 32), []
    for indices in loader(shards, 0):
        sizes.append(len(indices))
        commit(shards, member)
    assert sizes == [3, 3, 3, 3, 4] * 2


def test_a_step_of_fewer_batches_than_usual_counts_less() -> None:
    member = following(batch_size=16, shard_size=64)
    shards = shards_of(member, 64, batches_per_step=4)
    batches = loader(shards, 0)
    next(batches)
    assert commit(shards, member, batches=1)[1] == 0.25
    next(batches)
    next(batches)
    assert commit(shards, member, batches=2)[1] == 0.5


@pytest.mark.parametrize(
    "member",
    [
        following(smallest_share=1.0),
        following(rule="agn", local_steps=2),
        Member(settings(smallest_share=1 / 16), pb.UPDATE_KIND_DELTA),
    ],
    ids=["whole batches", "local steps", "deltas"],
)
def test_other_runs_have_whole_batches_and_their_commits_say_nothing(member: Member) -> None:
    member.links.leader.batch_share = 0.25
    shards = shards_of(member, 10)
    assert shards.batch_share == 1
    assert shards.share_of([], 0.5) == 0, "also if the loop says one"
    assert [(len(indices), commit(shards, member)[1]) for indices in loader(shards, 0)] == [(4, 0.0), (4, 0.0), (2, 0.0)]


def test_a_batch_larger_than_the_shards_is_whole_if_it_has_a_shard() -> None:
    member = following(batch_size=64, shard_size=32)
    shards, told = shards_of(member, 128), []
    for _ in loader(shards, 0):
        told.append(commit(shards, member)[1])
        member.links.leader.batch_share = 0.5
    assert told == [1.0, *[0.5] * 6]
