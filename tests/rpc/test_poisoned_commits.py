"""Poisoned commits to real servers are rejected for their norm on every transport, and counted; their worker is quarantined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.region import region_bytes
from gem_api.v1 import admin_pb2, tensors_pb2
from gem_server.config import StartError
from gem_server.core.norm_bound import MIN_NORMS
from kit.raw_client import SMALL, Refusal, Theta, Wire, Worker, apply_thread_held, chunk, chunks, register_request, theta_bits
from kit.raw_lane import LaneFailed
from kit.regions import LARGE, abstract, all_the_time, linux_only, memory_bytes, queue_length, shared, theta_of
from kit.server import Live, config, serving, wait_until
from kit.ways import FAILED, all_ways, refusal_of, through_sockets, wired

LAYOUTS = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
Commit = Callable[[Theta], Refusal]
APPLIED = Refusal(None, "", "", "")


@contextmanager
def bounded(ratio: float = 10.0, way: str = "grpc", **changes: Any) -> Iterator[tuple[Live, Wire]]:
    """A server that takes norms up to `ratio` times the median, and a client whose workers' commits go this way."""
    with serving(config(max_norm_ratio=ratio, memory_socket=abstract(), **changes)) as live, wired(live, way) as wire:
        yield live, wire


def seasoned(wire: Wire, name: str = "ann", layout: Layout = SMALL) -> Worker:
    """A worker whose commits are the run's history, each of the norm √P."""
    worker = wire.started(name, layout)
    for _ in range(MIN_NORMS):
        worker.commit()
    return worker


def joined(wire: Wire, name: str, layout: Layout = SMALL) -> Worker:
    worker = wire.join(name, layout)
    worker.pull()
    return worker


def committing(worker: Worker) -> Commit:
    """What commits a gradient, and returns how it was refused, or APPLIED."""

    def commit(gradient: Theta) -> Refusal:
        try:
            worker.took(worker.whole(worker.header(), *chunks(gradient)).answer(worker.size))
        except FAILED as error:
            return refusal_of(error)
        return APPLIED

    return commit


def everything(live: Live) -> bytes:
    """Every bit of θ, and of every worker's m and s."""

    def look() -> bytes:
        buffers = [buffer for lease in live.core.leases.live.values() for buffer in lease.buffers.values()]
        return b"".join(array.tobytes() for array in (live.core.central.theta, *buffers))

    return live.on_loop(look)


def rejected(wire: Wire) -> dict[str, int]:
    """Refused commits of each live worker."""
    return {worker.name: worker.rejected for worker in wire.status().workers}


def in_quarantine(wire: Wire) -> dict[str, int]:
    workers = wire.call("ListQuarantine", admin_pb2.ListQuarantineRequest()).workers
    return {worker.name: worker.refusals for worker in workers}


def lift(wire: Wire, name: str) -> None:
    wire.call("LiftQuarantine", admin_pb2.LiftQuarantineRequest(worker_name=name))


# -- refused


@LAYOUTS
@all_ways
def test_a_poisoned_commit_is_refused_and_no_bit_moves(way: str, layout: Layout) -> None:
    with bounded(way=way) as (live, wire):
        seasoned(wire, layout=layout)
        eve = joined(wire, "eve", layout)
        commit = committing(eve)
        before, bits = theta_bits(live), everything(live)
        for at in (0, layout.size - 1):  # one huge element is enough, in any piece
            gradient = np.ones(layout.size, np.float32)
            gradient[at] = 1e6
            refusal = commit(gradient)
            assert refusal.error == "NORM_OUT_OF_BOUNDS"
            assert refusal.status in (None, grpc.StatusCode.INVALID_ARGUMENT)
            assert "times the median" in refusal.details
        assert (theta_bits(live), everything(live)) == (before, bits)
        assert commit(np.ones(layout.size, np.float32)) == APPLIED, "the sequence is still free, and the worker may go on"
        assert theta_bits(live)[0] == before[0] + 1


@through_sockets
def test_what_counts_is_the_gradient_after_it_was_decoded(way: str) -> None:
    with bounded(way=way) as (live, wire):
        eve = seasoned(wire)
        packed = np.full(SMALL.size, 6e4, np.float32).view(np.uint16)[1::2].tobytes()
        before = theta_bits(live)
        refusal = eve.whole(eve.header(wire_dtype=tensors_pb2.WIRE_DTYPE_BFLOAT16), chunk(0, packed)).refusal()
        assert refusal.error == "NORM_OUT_OF_BOUNDS"
        assert theta_bits(live) == before


@linux_only
@pytest.mark.shared_memory
@LAYOUTS
def test_what_is_written_to_shared_memory_after_the_judgement_is_not_applied(layout: Layout) -> None:
    """The gradient that was measured is the gradient that is applied: a copy that the worker can't reach."""
    with bounded() as (live, wire), bounded() as (other, plain):
        seasoned(plain, layout=layout)
        joined(plain, "ann", layout).commit(1.0)
        seasoned(wire, layout=layout)
        region = shared(joined(wire, "ann", layout))
        region.gradient[:] = 1.0
        with apply_thread_held(live) as release:
            lane = region.sent()
            wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
            region.gradient[:] = 1e6
            release()
            region.answered(lane)
        assert theta_bits(live) == theta_bits(other)
        region.close()


@linux_only
@pytest.mark.shared_memory
def test_no_commit_moves_theta_further_than_the_bound() -> None:
    """60 commits under which the gradient changes all the time between 0.5 and 10,000 times the history's."""
    settings = Hyperparameters(rule="downpour", learning_rate=0.5)
    with bounded(10.0, settings=settings, quarantine_after=0) as (live, wire):
        seasoned(wire, layout=LARGE)
        eve = joined(wire, "eve", LARGE)
        region, applied = shared(eve), 0
        values = itertools.cycle((1e4, 0.5, 0.5))
        with all_the_time(lambda: region.gradient.fill(next(values))):
            for _ in range(60):
                before = theta_of(live)
                lane = region.sent()
                try:
                    eve.took(region.answered(lane))
                    applied += 1
                except LaneFailed as failed:
                    if failed.refusal.error != "NORM_OUT_OF_BOUNDS":
                        raise
                moved = float(np.linalg.norm(theta_of(live).astype(np.float64) - before))
                assert moved <= 1.001 * 0.5 * 10 * math.sqrt(LARGE.size)
        assert applied > 0, "no commit got past the judgement: nothing was tried"
        region.close()


@linux_only
@pytest.mark.shared_memory
def test_the_private_copy_is_counted_as_memory() -> None:
    with bounded() as (live, wire):
        ann = wire.started("ann", LARGE)
        before = memory_bytes(live)
        region = shared(ann)
        region.commit()
        assert memory_bytes(live) == before + region_bytes(LARGE.size)
        region.close()


# -- counted


def test_refusals_are_counted_by_worker_and_by_error() -> None:
    with bounded(quarantine_after=0) as (live, wire):
        ann = seasoned(wire)
        eve = committing(joined(wire, "eve"))
        for value in (1e6, 1e6, np.nan):
            assert eve(np.full(SMALL.size, value, np.float32)) != APPLIED
        ann.commit()
        assert rejected(wire) == {"ann": 0, "eve": 3}
        assert live.metric("gem_worker_rejected_total", worker="eve") == 3
        assert live.metric("gem_worker_rejected_total", worker="ann") == 0
        assert live.metric("gem_commits_rejected_total", error="NormOutOfBounds") == 2
        assert live.metric("gem_commits_rejected_total", error="NonFiniteGradient") == 1
        assert wire.status().commits["rejected"] == 3


# -- off


def test_a_ratio_that_would_refuse_ordinary_commits_is_a_wrong_start() -> None:
    with pytest.raises(StartError, match=r"max_norm_ratio 0\.5"), serving(config(max_norm_ratio=0.5)):
        pass


# -- quarantine


@all_ways
def test_the_third_refusal_in_a_row_puts_a_worker_into_quarantine(way: str) -> None:
    with bounded(way=way) as (live, wire):
        ann = seasoned(wire)
        eve = joined(wire, "eve")
        commit = committing(eve)
        before = theta_bits(live)
        bad = eve.gradient(1e6)
        errors = [refusal.error for refusal in (commit(bad), commit(bad))]
        assert errors == ["NORM_OUT_OF_BOUNDS"] * 2
        last = commit(bad)
        assert last.error == "QUARANTINED"
        assert last.status in (None, grpc.StatusCode.PERMISSION_DENIED)
        assert "NormOutOfBounds" in last.details
        assert "gem-ctl quarantine lift" in last.details
        assert theta_bits(live) == before

        assert [worker.name for worker in wire.status().workers] == ["ann"]
        assert dict(wire.status().leases_ended) == {"quarantined": 1}
        assert in_quarantine(wire) == {"eve": 3}
        assert live.metric("gem_quarantined_workers") == 1
        late = commit(eve.gradient(1.0))
        assert (late.error, late.reason) == ("LEASE_ENDED", "quarantined")
        request = register_request("eve", [("w", (3, 5)), ("b", (2,))], 0, SMALL.size)
        assert wire.refusal("RegisterWorker", request).error == "QUARANTINED"
        assert ann.commit()[0].version == before[0] + 1, "the others go on"

        lift(wire, "eve")
        assert in_quarantine(wire) == {}
        again = joined(wire, "eve")
        assert again.commit()[0].version == before[0] + 2


def test_the_history_survives_a_restart_and_the_quarantine_does_not(tmp_path: Any) -> None:
    with bounded(checkpoint_dir=tmp_path) as (_, wire):
        seasoned(wire)
        eve = joined(wire, "eve")
        for _ in range(3):
            committing(eve)(eve.gradient(1e6))
        assert in_quarantine(wire) == {"eve": 3}
    with bounded(checkpoint_dir=tmp_path, resume=True) as (_, wire):
        assert in_quarantine(wire) == {}
        eve = joined(wire, "eve")
        refusal = committing(eve)(eve.gradient(1e6))
        assert refusal.error == "NORM_OUT_OF_BOUNDS"
