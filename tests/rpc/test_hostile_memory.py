"""A worker that writes wrong values into its shared memory, or at the wrong time, harms only its own commit.

How that is so: the server sees only sealed memory, whose size no worker can change; it keeps moment and snapshot in memory
of its own; it checks a gradient when it arrives, and each element once more in the pass, in a private copy.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from gem_api.region import region_bytes
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import SMALL, Wire, Worker, theta_bits
from kit.raw_lane import LaneFailed, header, hello, offer, unix
from kit.regions import LARGE, PAGE, RULES, Shared, all_the_time, asked, linux_only, shared, sharing, theta_of
from kit.server import Live

pytestmark = [linux_only, pytest.mark.shared_memory]

P = SMALL.size


@contextmanager
def scribbling(region: Shared) -> Iterator[None]:
    """Random bits, NaN and infinities among them, all over the gradient and the answer, until the block ends."""
    dice = np.random.default_rng(3)
    noise = dice.integers(0, 2**32, region.gradient.size, np.uint32)
    noise[::7] = np.float32(np.nan).view(np.uint32)
    noise[1::7] = np.float32(np.inf).view(np.uint32)
    calm = np.full(region.gradient.size, 0.5, np.float32).view(np.uint32)
    gradient, answer = region.gradient.view(np.uint32), region.answer.view(np.uint32)
    patterns = itertools.cycle((noise, calm, calm))

    def scribble() -> None:
        gradient[:] = next(patterns)
        answer[:] = noise

    with all_the_time(scribble):
        yield


@pytest.mark.parametrize("rule", ["gem, after", "downpour"])
def test_a_worker_that_scribbles_all_the_time_harms_no_one_else(rule: str) -> None:
    """50 commits under which gradient and answer change all the time, an honest worker's in between."""
    with sharing(RULES[rule], LARGE) as (live, wire, hostile, region):
        honest = wire.join("honest", LARGE)
        honest.pull()
        home = shared(honest)
        applied = 0
        with scribbling(region):
            for _ in range(50):
                result = result_or_none(region)
                if result is not None:
                    hostile.took((result, region.answer))
                    applied += 1
                assert home.commit(0.001)[1].tobytes() == theta_bits(live)[1]
        assert applied > 0, "no commit got past the check: the pass never met what the worker wrote"
        assert np.isfinite(theta_of(live)).all()
        assert theta_bits(live)[0] == 50 + applied
        assert honest.pull()[1].tobytes() == theta_bits(live)[1]
        assert region.commit(0.001)[1].tobytes() == theta_bits(live)[1]
        home.close()


def result_or_none(region: Shared) -> pb.CommitResult | None:
    """The result of a commit, or None if it was refused for a bad gradient."""
    try:
        return region.answered(region.sent())[0]
    except LaneFailed as failed:
        if failed.refusal.error != "NON_FINITE_GRADIENT":
            raise
        return None


HOSTILE: dict[str, Callable[[Shared], object]] = {
    "writes over the first page": lambda region: region.memory.__setitem__(slice(0, PAGE), b"x" * PAGE),
    "punches a hole into it": lambda region: region.memory.madvise(mmap.MADV_REMOVE),
    "unmaps it": lambda region: region.unmap(),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_a_worker_does_to_its_side_the_server_goes_on(what: str, live: Live, wire: Wire, worker: Worker) -> None:
    region = shared(worker)
    region.commit()
    HOSTILE[what](region)
    lane = region.lane
    lane.commit(header(worker))
    assert lane.answer()[0].version == 2
    lane.close()
    honest = wire.join("honest")
    honest.pull()
    assert honest.commit()[0].version == 3
    assert np.isfinite(theta_of(live)).all()


def test_a_worker_that_leases_its_region_keeps_nobody_waiting(live: Live, wire: Wire, worker: Worker) -> None:
    """The kernel would make whoever opens a leased file wait for 45 s: the server does that under its lock."""
    offered = offer(worker)
    with unix(offered.socket) as lane:
        lane.send(hello(offered.token))
        descriptor = lane.welcomed()
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # what asks for the lease back; by default it is ignored
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with asked(worker) as again:
            assert again.refusal().error == "OVERLOADED"
        worker.leave()
        assert bytes_still_mapped(live) == region_bytes(P)
        assert wire.join("honest").pull()
    finally:
        os.close(descriptor)
    assert bytes_still_mapped(live) == 0


def bytes_still_mapped(live: Live) -> int:
    """Bytes that are counted for regions which processes still map."""
    live.on_loop(live.server.wiring.lane.regions.take_back)
    return int(live.on_loop(lambda: live.core.memory.regions))
