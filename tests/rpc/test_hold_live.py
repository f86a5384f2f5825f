"""A server of several holds commits back between BeginCheckpoint and its copy, and loses none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gem_api.v1 import admin_pb2
from gem_server.intake.hold import HOLD_SECONDS
from kit.raw_client import wired
from kit.raw_ranges import Ranges, commit_all, serving_ranges, with_cut
from kit.server import config, serving, wait_until

BEGIN = admin_pb2.BeginCheckpointRequest()


@pytest.fixture
def ranges(tmp_path: Path) -> Iterator[Ranges]:
    with serving_ranges(tmp_path) as running:
        yield running


def held(ranges: Ranges, index: int, expected: list[int]) -> None:
    wait_until(lambda: ranges.held(index) == expected, f"range {index} to hold {expected}")


@pytest.mark.parametrize("way", ["grpc", "tcp"])
def test_commits_wait_from_the_beginning_to_the_copy(way: str, tmp_path: Path) -> None:
    with serving_ranges(tmp_path, way=way) as ranges:
        ann, bob = ranges.started("ann"), ranges.joined("bob")
        commit_all(ann)
        lease = ann[0].lease_id
        assert [ranges.begin(0), ranges.begin(1)] == [{lease: 1}, {lease: 1}]
        streams = [each.stream(each.header(), *each.body()) for each in (*ann, bob[0])]
        held(ranges, 0, [2, 1])
        held(ranges, 1, [2])
        for wire in ranges.wires:
            written = wire.call("CreateCheckpoint", with_cut({lease: 1}))
            assert written.version == 1
            assert len(written.sha256) == 32
        assert [stream.answer(each.size)[0].sequence for stream, each in zip(streams, (*ann, bob[0]), strict=True)] == [2, 2, 1]
        assert ranges.sequences(0) == {"ann": 2, "bob": 1}


def test_the_cut_lets_earlier_commits_pass_and_later_ones_wait(ranges: Ranges) -> None:
    ann, bob = ranges.started("ann"), ranges.joined("bob")
    commit_all(ann)
    ann[0].commit()  # range 1 does not have it yet
    cut = ranges.begin(0)
    ranges.begin(1)
    late = ann[1].stream(ann[1].header(), *ann[1].body())
    later = bob[1].stream(bob[1].header(), *bob[1].body())
    wait_until(lambda: len(ranges.held(1)) == 2, "both commits to wait")
    written = ranges.wires[1].call("CreateCheckpoint", with_cut(cut))
    assert written.version == 2
    assert late.answer(ann[1].size)[0].version == 2
    assert later.answer(bob[1].size)[0].version == 3


def test_the_checkpoint_waits_for_commits_of_the_cut(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ann[0].commit()
    cut = ranges.begin(0)
    ranges.begin(1)
    creating = ranges.wires[1].whole("CreateCheckpoint", with_cut(cut).SerializeToString())
    wait_until(lambda: ranges.lives[1].on_loop(lambda: ranges.lives[1].server.parts.commit_path.hold.has_cut), "the cut")
    assert ann[1].commit()[0].version == 1  # it need not wait
    assert admin_pb2.CreateCheckpointResponse.FromString(creating.read()).version == 1


def test_a_dead_workers_lease_ends_the_wait(ranges: Ranges) -> None:
    ann, bob = ranges.started("ann"), ranges.joined("bob")
    commit_all(bob)
    ann[0].commit()
    cut = ranges.begin(0)
    ranges.begin(1)
    creating = ranges.wires[1].whole("CreateCheckpoint", with_cut(cut).SerializeToString())
    ann[1].leave()
    assert admin_pb2.CreateCheckpointResponse.FromString(creating.read()).version == 1


def test_a_rejected_commit_is_not_waited_for(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ann[0].commit()
    assert ann[1].whole(ann[1].header(), *ann[1].body(float("nan"))).refusal().error == "NON_FINITE_GRADIENT"
    cut = ranges.begin(0)
    ranges.begin(1)
    assert ranges.wires[1].call("CreateCheckpoint", with_cut(cut)).version == 0


def test_a_rejected_commit_that_skips_others_does_not_count_for_them(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ann[0].commit()
    poisoned = ann[1].whole(ann[1].header(sequence=1 << 40), *ann[1].body(float("nan")))
    assert poisoned.refusal().error == "NON_FINITE_GRADIENT"
    cut = ranges.begin(0)
    ranges.begin(1)
    creating = ranges.wires[1].whole("CreateCheckpoint", with_cut(cut).SerializeToString())
    wait_until(lambda: ranges.lives[1].on_loop(lambda: ranges.lives[1].server.parts.commit_path.hold.has_cut), "the cut")
    ann[1].commit()
    assert admin_pb2.CreateCheckpointResponse.FromString(creating.read()).version == 1


def test_a_later_commit_shows_that_the_earlier_one_does_not_come(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ann[0].commit()
    cut = ranges.begin(0)
    ranges.begin(1)
    creating = ranges.wires[1].whole("CreateCheckpoint", with_cut(cut).SerializeToString())
    next_one = ann[1].stream(ann[1].header(sequence=2), *ann[1].body())
    assert admin_pb2.CreateCheckpointResponse.FromString(creating.read()).version == 0
    assert next_one.answer(ann[1].size)[0].sequence == 2


def test_a_hold_ends_by_itself_and_its_checkpoint_fails(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ann[0].commit()
    cut = ranges.begin(0)
    ranges.begin(1)
    waiting = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [2])
    creating = ranges.wires[1].whole("CreateCheckpoint", with_cut(cut).SerializeToString())
    for live in ranges.lives:
        live.clock.advance(HOLD_SECONDS + 1)
    assert waiting.answer(ann[0].size)[0].sequence == 2
    refusal = creating.refusal()
    assert refusal.error == "CHECKPOINT_FAILED"
    assert "ann" in refusal.details
    late = ranges.wires[0].refusal("CreateCheckpoint", with_cut(cut))
    assert (late.error, "begin the checkpoint again" in late.details) == ("CHECKPOINT_FAILED", True)
    assert ranges.begin(0) == {ann[0].lease_id: 2}  # it can be repeated


def test_a_repeat_of_a_held_commit_waits_with_it(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.begin(0)
    first = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [1])
    again = ann[0].stream(ann[0].header(), *ann[0].body())
    assert first.refusal().error == "SUPERSEDED"
    assert ranges.held(0) == [1]
    ranges.wires[0].call("CreateCheckpoint", with_cut({}))
    assert again.answer(ann[0].size)[0].version == 1
    assert ranges.sequences(0) == {"ann": 1}


def test_a_held_commit_keeps_its_lease_alive(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.begin(0)
    stream = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [1])
    live = ranges.lives[0]
    assert live.on_loop(lambda: live.core.expire(live.clock() + 1000)) == []
    ranges.wires[0].call("CreateCheckpoint", with_cut({}))
    assert stream.answer(ann[0].size)[0].version == 1


def test_a_lease_that_ends_takes_its_held_commit_with_it(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.begin(0)
    stream = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [1])
    ann[0].leave()
    assert stream.refusal().error == "LEASE_ENDED"
    held(ranges, 0, [])
    assert ranges.wires[0].call("CreateCheckpoint", with_cut({})).version == 0


def test_a_second_beginning_is_refused_and_disturbs_nothing(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.begin(0)
    refusal = ranges.wires[0].refusal("BeginCheckpoint", BEGIN)
    assert (refusal.error, "try again" in refusal.details) == ("CHECKPOINT_FAILED", True)
    stream = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [1])
    ranges.wires[0].call("CreateCheckpoint", with_cut({}))
    assert stream.answer(ann[0].size)[0].version == 1


@pytest.mark.parametrize("cut", [{}, {"": 0}, {"stranger": 7}])
def test_a_cut_that_cannot_be_ends_the_hold(cut: dict[str, int], ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ann[0].commit()
    ranges.begin(0)
    stream = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [2])
    assert ranges.wires[0].refusal("CreateCheckpoint", with_cut(cut)).error == "CHECKPOINT_FAILED"
    assert stream.answer(ann[0].size)[0].sequence == 2


@pytest.mark.parametrize("way", ["grpc", "tcp"])
def test_a_server_that_drains_applies_what_it_held_back(way: str, tmp_path: Path) -> None:
    with serving_ranges(tmp_path, way=way) as ranges:
        ann = ranges.started("ann")
        ranges.begin(0)
        stream = ann[0].stream(ann[0].header(), *ann[0].body())
        held(ranges, 0, [1])
        assert ranges.wires[0].call("Drain", admin_pb2.DrainRequest()).queue_length == 1
        assert stream.answer(ann[0].size)[0].version == 1
        ranges.lives[0].stop()
        assert ranges.lives[0].core.central.version == 1


def test_a_commit_whose_client_has_gone_is_applied_all_the_same(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.begin(0)
    stream = ann[0].stream(ann[0].header(), *ann[0].body())
    held(ranges, 0, [1])
    stream.cancel()
    ranges.wires[0].call("CreateCheckpoint", with_cut({}))
    wait_until(lambda: ranges.sequences(0) == {"ann": 1}, "the commit to be applied")


def test_pulls_and_registrations_go_on(ranges: Ranges) -> None:
    ranges.started("ann")
    for index in (0, 1):
        ranges.begin(index)
    assert ranges.joined("bob")[1].pull()[0].version == 0


def test_nothing_to_write_is_said_at_once(ranges: Ranges) -> None:
    refusal = ranges.wires[0].refusal("BeginCheckpoint", BEGIN)
    assert (refusal.error, "no parameters yet" in refusal.details) == ("CHECKPOINT_FAILED", True)


def test_a_server_that_holds_everything_refuses(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path, durability="log")) as live, wired(live) as wire:
        wire.started("ann")
        for rpc, request in {
            "BeginCheckpoint": BEGIN,
            "CreateCheckpoint": with_cut({}),
            "WriteManifest": admin_pb2.WriteManifestRequest(),
        }.items():
            refusal = wire.refusal(rpc, request)
            assert (refusal.error, "holds all of the model" in refusal.details) == ("INVALID_REQUEST", True)
        assert wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest()).version == 0
