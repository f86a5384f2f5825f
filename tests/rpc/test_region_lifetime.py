"""A region of shared memory takes as many bytes as are counted, belongs to its lease, and is freed with it."""

from __future__ import annotations

import os
import threading

import pytest
from gem_api.region import Region, create_region
from gem_server.lane import regions
from kit.raw_client import SMALL, Worker, apply_thread_held, theta_bits, wired
from kit.raw_lane import LaneFailed
from kit.regions import (
    ENDS,
    RULES,
    abstract,
    asked,
    fetched,
    handed_over,
    linux_only,
    memory_bytes,
    queue_length,
    regions_bytes,
    shared,
    shares,
    until_held,
)
from kit.server import DEADLINE, Live, config, serving, wait_until

pytestmark = [linux_only, pytest.mark.shared_memory]

P = SMALL.size
THETA = 4 * P
EACH = 3 * 4 * P  # the proxy's moment, the snapshot and the gradient that arrives in chunks
REGION = 3 * 4096  # a page each for the name, the gradient and the answer


# -- memory that takes its time, or can't be had


class Slow:
    """In place of `create_region`: takes until it is told to go on."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.inode = ""

    def __call__(self, parameters: int) -> tuple[Region, int]:
        self.asked.set()
        assert self.go_on.wait(DEADLINE)
        region, descriptor = create_region(parameters)
        self.inode = str(os.fstat(descriptor).st_ino)
        return region, descriptor


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(regions, "create_region", slow)
    return slow


def test_a_lease_that_ends_while_its_region_is_made_leaves_none_behind(live: Live, worker: Worker, slow: Slow) -> None:
    visitor = asked(worker)
    assert slow.asked.wait(DEADLINE)
    worker.leave()
    slow.go_on.set()
    assert handed_over(visitor) is None
    until_held(slow.inode, 0)
    wait_until(lambda: memory_bytes(live) == THETA, "the region to be counted no more")


def test_a_region_whose_worker_has_left_meanwhile_is_not_left_behind(live: Live, worker: Worker, slow: Slow) -> None:
    """A descriptor that nobody closes would keep all of its memory for as long as the server lives."""
    with asked(worker):
        assert slow.asked.wait(DEADLINE)
    slow.go_on.set()
    wait_until(lambda: slow.inode, "the region to be made")
    worker.leave()
    until_held(slow.inode, 0)
    wait_until(lambda: memory_bytes(live) == THETA, "the region to be counted no more")


def test_a_second_lane_does_not_wait_for_a_region_that_is_being_made(worker: Worker, slow: Slow) -> None:
    with asked(worker):
        assert slow.asked.wait(DEADLINE)
        second = asked(worker)
        with pytest.raises(LaneFailed) as failed:
            second.welcomed()
        assert failed.value.refusal.error == "OVERLOADED"
        second.close()
        slow.go_on.set()
    wait_until(lambda: shares(worker), "the region to be ready")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()], ids=["OSError", "MemoryError"])
def test_memory_that_can_not_be_had_costs_the_region(
    error: Exception, live: Live, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(parameters: int) -> tuple[Region, int]:
        raise error

    with monkeypatch.context() as out_of_memory:
        out_of_memory.setattr(regions, "create_region", fail)
        assert not shares(worker)
    assert memory_bytes(live) == THETA + EACH
    assert worker.commit()[0].version == 1
    assert shares(worker)


# -- what it costs


@pytest.mark.parametrize("rule", ["gem, after", "downpour"])
def test_a_region_is_counted_from_when_it_is_handed_over(rule: str) -> None:
    with serving(config(RULES[rule], memory_socket=abstract())) as live, wired(live) as wire:
        worker = wire.started("worker")
        alone = memory_bytes(live)
        assert alone == THETA + wire.status().workers[0].memory_bytes + 4 * P  # and where its gradients arrive
        region = shared(worker)
        assert memory_bytes(live) == alone + REGION
        assert wire.status().memory_bytes == alone + REGION
        assert wire.status().workers[0].transport == ""
        region.commit()
        status = wire.status()
        assert status.workers[0].transport == "memory"
        assert status.memory_bytes == THETA + status.workers[0].memory_bytes
        worker.leave()
        assert memory_bytes(live) == THETA + REGION  # for the worker still maps it
        region.close()
        wait_until(lambda: memory_bytes(live) == THETA, "the region to be counted no more")


@pytest.mark.parametrize(("spare", "handed"), [(-1, False), (0, True)])
def test_a_region_is_handed_over_up_to_the_last_byte_of_the_memory_limit(spare: int, handed: bool) -> None:
    limit = THETA + EACH + REGION + spare
    with serving(config(memory_socket=abstract(), memory_limit=limit)) as live, wired(live) as wire:
        worker = wire.started("worker")
        assert shares(worker) == handed
        assert memory_bytes(live) == THETA + EACH + (REGION if handed else 0)
        assert worker.commit()[0].version == 1


def test_a_lease_that_asks_again_and_again_has_one_region(live: Live, worker: Worker) -> None:
    asked = [shared(worker) for _ in range(5)]
    assert len({region.inode for region in asked}) == 1
    assert memory_bytes(live) == THETA + EACH + REGION
    asked[0].commit()
    asked[-1].commit()
    assert memory_bytes(live) == THETA + 2 * 4 * P + REGION
    for region in asked:
        region.close()


def test_memory_that_stays_mapped_after_its_lease_is_counted() -> None:
    """A worker registers again and again, and keeps each region: what exists is what is counted, within the limit."""
    limit = THETA + EACH + 4 * REGION
    with serving(config(memory_socket=abstract(), memory_limit=limit)) as live, wired(live) as wire:
        wire.started("worker")
        before = regions_bytes()
        kept = [region for region in (fetched(wire.join("worker")) for _ in range(20)) if region is not None]
        assert len(kept) == 4
        assert regions_bytes() - before + THETA + EACH == memory_bytes(live) <= limit
        wire.join("worker").pull()  # only its shared memory is refused
        for region in kept:
            region.close()
        wait_until(lambda: memory_bytes(live) == THETA + EACH, "the regions to be counted no more")
        assert shares(wire.join("worker"))


# -- when it is gone


@pytest.mark.parametrize(("end", "used"), [*((end, True) for end in ENDS), ("left", False)])
def test_the_server_unmaps_a_region_when_its_lease_ends(end: str, used: bool, live: Live, worker: Worker) -> None:
    region = shared(worker)
    if used:
        region.commit()
    until_held(region.inode, 2)
    ENDS[end](live, worker)
    until_held(region.inode, 1)
    region.gradient[:] = 1.0  # the worker's side stands as long as it wants
    region.close()
    until_held(region.inode, 0)


def test_a_region_is_unmapped_after_the_turn_of_its_last_commit(live: Live, worker: Worker) -> None:
    region = shared(worker)
    region.commit()
    with apply_thread_held(live) as release:
        lane = region.sent()
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        worker.leave()
        assert lane.refusal().error == "LEASE_ENDED"
        release()
    until_held(region.inode, 1)
    assert theta_bits(live)[0] == 1
    region.close()


def test_a_server_that_stops_unmaps_every_region() -> None:
    with serving(config(memory_socket=abstract())) as live, wired(live) as wire:
        workers = wire.crew(2)
        regions = [shared(worker) for worker in workers]
        for region in regions:
            region.commit()
            until_held(region.inode, 2)
    del live
    for region in regions:
        until_held(region.inode, 1)
        region.close()
        until_held(region.inode, 0)
