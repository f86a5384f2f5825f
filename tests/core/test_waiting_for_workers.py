"""A core hands out no shard before `min_workers` workers have joined, and nobody else has for `start_quiet_seconds`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from gem_server.core.gathering import LATEST_SECONDS, Gathering
from gem_server.core.shards import NoShard
from gem_server.core.state_machine import Core
from gem_server.core.values import Awaited
from gem_server.durability import checkpoint
from kit.core import SMALL, commit, make_core, save_core, start


def awaiting(workers: int) -> tuple[Core, str, str]:
    """A core that waits for so many workers, and the leases of two that are there."""
    core = make_core(min_workers=workers)
    ann, bob = start(core, ["ann", "bob"])
    return core, ann, bob


def test_no_shard_is_handed_out_before_all_workers_that_are_waited_for_have_joined() -> None:
    core, ann, bob = awaiting(3)
    assert core.lease_shard(ann, 1000, 0.0) == NoShard(complete=False)
    assert core.awaited(0.0) == Awaited(min_workers=3, seconds=0.0, at_most=0.0)
    core.register("cid", SMALL, 0.0)
    assert core.awaited(0.0) is None
    assert not isinstance(core.lease_shard(ann, 1000, 0.0), NoShard)
    assert not isinstance(core.lease_shard(bob, 1000, 0.0), NoShard)


def test_a_worker_that_comes_back_is_not_counted_twice() -> None:
    core, ann, _ = awaiting(3)
    core.register("bob", SMALL, 0.0)
    assert core.lease_shard(ann, 1000, 0.0) == NoShard(complete=False)


def test_once_all_were_there_nobody_is_waited_for_again() -> None:
    core, ann, bob = awaiting(2)
    core.leave(bob)
    assert not isinstance(core.lease_shard(ann, 1000, 0.0), NoShard)


def test_a_run_that_has_begun_waits_for_nobody() -> None:
    core, ann, _ = awaiting(3)
    commit(core, ann, 1, 1.0)
    assert not isinstance(core.lease_shard(ann, 1000, 0.0), NoShard)


def test_waiting_keeps_the_lease() -> None:
    core, ann, _ = awaiting(3)
    core.lease_shard(ann, 1000, 170.0)
    assert [ended.worker for ended in core.expire(190.0)] == ["bob"]


# -- until nobody else joins

QUIET = 15.0


def gathering(times: Sequence[float] = (0.0,), min_workers: int = 1) -> Core:
    """A core that waits until nobody joins for 15 s, with a worker for each of these times at which it has joined."""
    core = make_core(start_quiet_seconds=QUIET, min_workers=min_workers)
    for number, now in enumerate(times):
        core.register(f"worker-{number}", SMALL, now)
    return core


def begun(core: Core, now: float) -> bool:
    """Whether the oldest worker gets a shard at this time."""
    return not isinstance(core.lease_shard(next(iter(core.leases.live)), 1000, now), NoShard)


@pytest.mark.parametrize("now", [0.1, 32_400.3, 130_900.7])
def test_the_times_that_are_left_are_exact_however_long_the_machine_has_run(now: float) -> None:
    waited = Awaited(min_workers=1, seconds=QUIET, at_most=LATEST_SECONDS)
    assert gathering([]).awaited(now) == waited
    assert gathering([now]).awaited(now) == waited


def test_the_first_shard_is_handed_out_once_nobody_has_joined_for_some_seconds() -> None:
    core = gathering([0.0, 10.0, 20.0])
    assert core.awaited(22.0) == Awaited(min_workers=1, seconds=13.0, at_most=578.0)
    assert not begun(core, 34.9)
    assert begun(core, 35.0)
    core.register("late", SMALL, 36.0)
    assert begun(core, 36.0)


def test_workers_that_keep_joining_hold_a_run_up_for_ten_minutes_at_most() -> None:
    core = gathering([10.0 * number for number in range(1, 61)])
    for lease_id in list(core.leases.live):
        core.renew(lease_id, 600.0)
    assert core.awaited(609.0) == Awaited(min_workers=1, seconds=1.0, at_most=1.0)
    assert not begun(core, 10.0 + LATEST_SECONDS - 0.1)
    assert begun(core, 10.0 + LATEST_SECONDS)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("name", ["loop", "loop-{}"])
def test_a_worker_that_crashes_and_comes_back_holds_nobody_up(name: str, leaves: bool) -> None:
    """Whether its name is the same each time or another, and whether it leaves the run or its lease expires."""
    core, now, lease = gathering(), 0.0, ""
    while not begun(core, now := now + 5.0):
        if leaves and lease:
            core.leave(lease)
        lease = core.register(name.format(now), SMALL, now).lease_id
        core.expire(now)
    one_lease = 3 * 60.0  # seconds that the lease of a worker lasts that has only registered
    assert now <= 5.0 + (QUIET if leaves or name == "loop" else one_lease + QUIET)


def test_a_worker_that_crashes_and_comes_back_alone_begins_the_run_too() -> None:
    core = gathering()
    for now in (5.0, 10.0, 15.0):
        core.leave(next(iter(core.leases.live)))
        core.register("worker-0", SMALL, now)
    assert begun(core, 15.0)


def test_after_all_have_left_the_next_one_is_the_first_again() -> None:
    core = gathering()
    core.leave(next(iter(core.leases.live)))
    core.register("other", SMALL, 1000.0)
    assert core.awaited(1000.0) == Awaited(min_workers=1, seconds=QUIET, at_most=LATEST_SECONDS)


def test_a_run_waits_both_for_the_number_of_workers_and_until_nobody_else_joins() -> None:
    core = gathering([0.0, 1.0], min_workers=3)
    assert core.awaited(LATEST_SECONDS + 1) == Awaited(min_workers=3, seconds=0.0, at_most=0.0)
    core.register("third", SMALL, 20.0)
    assert not begun(core, 34.0)
    assert begun(core, 35.0)


def resumed(core: Core, directory: Path, min_workers: int = 1) -> Core:
    """The core of a server that is started again, with the same settings."""
    save_core(core, directory)
    again = make_core(start_quiet_seconds=QUIET, min_workers=min_workers, first_id=100)
    latest = checkpoint.newest(directory, lambda path, why: None)
    assert latest is not None
    checkpoint.restore(*latest, again, now=0.0)
    again.mark_restarted(None)
    return again


def test_a_resumed_run_does_not_wait_for_others_to_join(tmp_path: Path) -> None:
    core = make_core(start_quiet_seconds=QUIET)
    start(core, ["ann"])
    assert not begun(core, 1.0)
    assert begun(resumed(core, tmp_path), 1.0)


@pytest.mark.parametrize("dealt", [False, True])
def test_a_resumed_run_waits_for_the_number_of_workers_until_its_first_shard_was_dealt(dealt: bool, tmp_path: Path) -> None:
    core = make_core(min_workers=2)
    _, bob = start(core, ["ann", "bob"])
    if dealt:
        assert begun(core, 0.0)
    core.leave(bob)
    assert begun(resumed(core, tmp_path, min_workers=2), 1.0) is dealt


def test_before_anybody_has_joined_all_of_the_wait_lies_ahead() -> None:
    assert Gathering(1, QUIET).look(0, 1000.0) == Awaited(1, QUIET, LATEST_SECONDS)


def test_workers_that_were_away_for_less_than_the_quiet_time_do_not_make_it_begin_again() -> None:
    run = Gathering(3, QUIET)
    run.joined(1, 0.0)
    run.joined(2, 1.0)
    run.look(2, 96.0)
    run.joined(1, 100.0)
    awaited = run.look(1, 100.0)
    assert awaited is not None
    assert awaited.seconds == 0.0
