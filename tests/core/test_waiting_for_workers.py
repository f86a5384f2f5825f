"""A core hands out no shard before `min_workers` workers have joined."""

from __future__ import annotations

from gem_server.core.shards import NoShard
from gem_server.core.state_machine import Core
from kit.core import SMALL, commit, make_core, start


def awaiting(workers: int) -> tuple[Core, str, str]:
    """A core that waits for so many workers, and the leases of two that are there."""
    core = make_core(min_workers=workers)
    ann, bob = start(core, ["ann", "bob"])
    return core, ann, bob


def test_no_shard_is_handed_out_before_all_workers_that_are_waited_for_have_joined() -> None:
    core, ann, bob = awaiting(3)
    assert core.lease_shard(ann, 1000, 0.0) == NoShard(complete=False)
    assert core.workers_awaited == 3
    core.register("cid", SMALL, 0.0)
    assert core.workers_awaited == 0
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
