"""Leases on a running server: if a worker vanishes, leaves or is replaced, its memory and shards are released."""

from __future__ import annotations

import asyncio
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from gem_server import server
from gem_server.durability import recovery
from kit.raw_client import (
    SMALL,
    Stream,
    Wire,
    Worker,
    chunk,
    initialize_header,
    on_server_loop,
    path,
    received_bytes,
    wired,
)
from kit.regions import memory_bytes
from kit.server import Clock, Live, config, serving, wait_until
from kit.ways import all_ways, through_sockets

P = SMALL.size
EACH = 3 * 4 * P  # what the server holds for a worker: moment, snapshot, and the gradient that arrives


def renew(*workers: Worker) -> None:
    for worker in workers:
        worker.wire.call("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id))


def shard_of(worker: Worker) -> pb.LeaseShardResponse:
    request = pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=10)
    shard: pb.LeaseShardResponse = worker.wire.call("LeaseShard", request)
    return shard


def pass_time(live: Live, *survivors: Worker) -> None:
    """Moves the clock by more than a lease's minute; only the survivors give a sign of life meanwhile."""
    live.clock.advance(40)
    renew(*survivors)
    live.clock.advance(40)
    names = {worker.lease_id for worker in survivors}
    wait_until(lambda: live.on_loop(lambda: set(live.core.leases.live)) == names, "the others' leases to expire")


def waiting_pulls(live: Live) -> int:
    """Pull calls that wait for a value."""
    return live.on_loop(lambda: sum(call.exchanging for call in live.server.wiring.intake.calls._all))


# -- the ends of a lease


@through_sockets
@pytest.mark.parametrize("reason", ["expired", "left"])
def test_a_worker_that_vanishes_or_leaves_leaves_nothing_behind(reason: str, live: Live, wire: Wire, worker: Worker) -> None:
    alone = memory_bytes(live)
    ghost = wire.join("ghost")
    ghost.pull()
    stream = ghost.stream()
    ghost.commit_on(stream)
    held = shard_of(ghost).shard
    assert shard_of(worker).HasField("wait_seconds")
    assert memory_bytes(live) == alone + EACH

    if reason == "expired":
        pass_time(live, worker)
    else:
        ghost.leave()

    refusal = stream.refusal()
    assert (refusal.error, refusal.reason) == ("LEASE_ENDED", reason)
    assert refusal.status in (None, grpc.StatusCode.FAILED_PRECONDITION)
    assert memory_bytes(live) == alone
    given = shard_of(worker).shard
    assert (given.epoch, given.indices) == (held.epoch, held.indices)
    assert dict(wire.status().leases_ended) == {reason: 1}
    assert worker.commit()[0].version == 2


@all_ways
def test_a_server_that_stood_still_ends_no_lease_that_could_not_be_renewed_meanwhile(live: Live, wire: Wire) -> None:
    worker = wire.started("worker")
    live.clock.jump(10 * live.config.lease_seconds)
    live.on_loop(live.server.wiring.training.expire_leases)
    assert worker.commit()[0].version == 1
    pass_time(live)  # its worker is silent now, though the server runs
    assert dict(wire.status().leases_ended) == {"expired": 1}


def test_a_lease_lives_its_whole_time_from_the_end_of_a_slow_restart_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long log is read, or a compiler waits for a busy machine."""
    with serving(config(checkpoint_dir=tmp_path / "run", durability="log")) as live, wired(live) as wire:
        worker = wire.started("worker")
        worker.commit()
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    taken: list[float] = []
    monkeypatch.setattr(Clock, "__call__", lambda clock: time.monotonic() + clock.ahead + sum(taken))

    def slow_down(module: ModuleType, name: str, leases: float) -> None:
        work = getattr(module, name)

        def slow(*given: Any) -> Any:
            taken.append(leases * live.config.lease_seconds)
            return work(*given)

        monkeypatch.setattr(module, name, slow)

    slow_down(recovery, "replay", 10.0)
    slow_down(server, "warm_up", 0.4)
    with serving(config(checkpoint_dir=tmp_path / "crashed", durability="log", resume=True)) as live, wired(live) as wire:
        assert len(taken) == 2
        live.clock.advance(0.7 * live.config.lease_seconds)
        live.on_loop(live.server.wiring.training.expire_leases)
        worker.wire = wire
        assert worker.commit()[0].version == 2


@through_sockets
def test_a_lease_that_ends_while_its_answer_is_sent_ends_the_call_typed(live: Live, wire: Wire) -> None:
    worker = wire.started("worker", Layout.of({"w": (8_000_000,)}))  # more than any buffer between the two takes
    before = live.sent_bytes
    stream = worker.stream(worker.header(), *worker.body())
    wait_until(lambda: live.sent_bytes > before, "the answer to begin")
    worker.leave()
    refusal = stream.refusal()
    assert (refusal.error, refusal.reason) == ("LEASE_ENDED", "left")


@through_sockets
def test_a_name_that_registers_again_replaces_its_former_self(live: Live, wire: Wire, worker: Worker) -> None:
    stream = worker.stream()
    worker.commit_on(stream)
    held = shard_of(worker).shard
    before = memory_bytes(live)
    again = wire.join("worker")
    refusal = stream.refusal()
    assert (refusal.error, refusal.reason) == ("LEASE_ENDED", "replaced")
    assert memory_bytes(live) == before
    assert again.registration.steps_done == 1
    assert shard_of(again).shard.indices == held.indices
    again.pull()
    assert again.commit()[0].version == 2


# -- the first value


def half_initialized(live: Live, worker: Worker) -> Stream:
    """The stream of an initialiser that stopped half-way."""
    frames = [initialize_header(worker.lease_id), chunk(0, np.full(8, 9.0, np.float32).tobytes(), pb.InitializeCentralRequest)]
    before = received_bytes(live)
    stream = worker.wire.stream("InitializeCentral", *frames)
    wait_until(lambda: received_bytes(live) == before + len(b"".join(frames)), "the first value to begin")
    return stream


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_when_the_initialiser_goes_half_way_one_of_those_who_wait_is_asked(how: str, live: Live, wire: Wire) -> None:
    first, second, third = (wire.join(name) for name in ("first", "second", "third"))
    unfinished = half_initialized(live, first)
    pulls = {worker: worker.open_pull() for worker in (second, third)}
    wait_until(lambda: waiting_pulls(live) == 3, "both to wait in Pull")
    if how == "dies":
        unfinished.cancel()
        pass_time(live, second, third)
    else:
        first.leave()
        refusal = unfinished.refusal()
        assert (refusal.error, refusal.reason) == ("LEASE_ENDED", "left")

    header = pb.PullResponse.FromString(pulls[second].read()).header
    assert header.must_initialize
    assert pulls[second].ended_well()
    assert wire.whole("InitializeCentral", initialize_header(third.lease_id)).refusal().error == "INVALID_REQUEST"
    second.initialize(np.full(P, 2.0, np.float32))
    _, theta = pulls[third].pulled(P)
    assert theta.tolist() == [2.0] * P
    assert wire.whole("InitializeCentral", initialize_header(first.lease_id)).refusal().error == "LEASE_ENDED"


def test_a_pull_waits_for_the_first_value_as_long_as_its_lease_is_renewed(live: Live, wire: Wire) -> None:
    slow, patient = wire.join("slow"), wire.join("patient")
    pull = patient.open_pull()
    wait_until(lambda: waiting_pulls(live) == 1, "the pull to wait")
    for _ in range(10):
        live.clock.advance(40)
        renew(slow, patient)
    slow.initialize(np.full(P, 3.0, np.float32))
    header, theta = pull.pulled(P)
    assert header.version == 0
    assert theta.tolist() == [3.0] * P
    assert pull.ended_well()


# -- many


def test_hundreds_of_idle_streams_disturb_nobody(live: Live, wire: Wire, worker: Worker) -> None:
    idlers, alone = 200, memory_bytes(live)

    async def idle(channel: grpc.aio.Channel, number: int) -> grpc.aio.StreamStreamCall:
        request = pb.RegisterWorkerRequest(worker_name=f"idler {number}", layout=SMALL.to_message())
        answer = await channel.unary_unary(path("RegisterWorker"))(request.SerializeToString())
        idler = Worker(wire, pb.RegisterWorkerResponse.FromString(answer))
        stream = channel.stream_stream(path("Commit"))()
        for frame in (idler.header(), *idler.body(0.0)):
            await stream.write(frame)
        await stream.read()
        return stream

    async def all_idle() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(live.address, options=options) for _ in range(10)]
        streams = await asyncio.gather(*(idle(channels[number % 10], number) for number in range(idlers)))
        assert not any(stream.done() for stream in streams)
        opened.set()
        await finish.wait()
        for channel in channels:
            await channel.close()

    async def events() -> tuple[asyncio.Event, asyncio.Event]:
        return asyncio.Event(), asyncio.Event()

    opened, finish = on_server_loop(live, events)
    with ThreadPoolExecutor(1) as thread:
        idling = thread.submit(on_server_loop, live, all_idle)
        wait_until(lambda: opened.is_set() or idling.done(), "all streams to be open", deadline=120)
        assert memory_bytes(live) == alone + idlers * EACH
        for version in range(1, 6):
            assert worker.commit()[0].version == idlers + version
        live.on_loop(finish.set)
        idling.result()
    pass_time(live, worker)
    assert memory_bytes(live) == alone


def test_leases_last_as_long_as_the_server_says() -> None:
    with serving(config(Hyperparameters(), lease_seconds=5.0)) as live, wired(live) as wire:
        worker = wire.join("worker")
        assert worker.registration.lease_seconds == 5.0
        live.clock.advance(4)
        assert wire.call("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id)).lease_seconds == 5.0
        live.clock.advance(4)
        renew(worker)
        live.clock.advance(6)
        wait_until(lambda: not live.on_loop(lambda: live.core.leases.live), "the lease to expire")
