"""The time that calls and commits take, on the network too, and the errors that calls end with, by method."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from gem_api.v1 import training_pb2 as pb
from gem_server.core.state_machine import Core
from gem_server.intake import turns
from gem_server.intake.commit_exchange import CommitExchange
from gem_server.lane.connection import Connection
from gem_server.rpc.tensor_stream import Transfer
from gem_server.telemetry.rpc_metrics import CANCELLED, INTERNAL
from kit.model import in_background
from kit.raw_client import chunks, wired
from kit.regions import LARGE, linux_only
from kit.server import DEADLINE, Live, wait_until
from kit.ways import FAILED, all_ways, read_by_the_server, running, through_sockets

PAUSE, REAL = 30.0, 15.0  # seconds by which a test moves the clock, and less than which everything else takes


def totals(live: Live, name: str, **labels: str) -> tuple[float, float]:
    """How many values a histogram has, and their sum."""
    count, total = (live.metric(f"{name}_{kind}", **labels) for kind in ("count", "sum"))
    assert count is not None
    assert total is not None
    return count, total


def measured(live: Live, method: str) -> tuple[float, float]:
    """How many calls of a method have ended, and their seconds."""
    return totals(live, "gem_rpc_seconds", method=method)


def seconds(live: Live, name: str, direction: str) -> tuple[float, float]:
    """How many commits' tensors went in a direction, and their seconds."""
    return totals(live, name, direction=direction)


def errors(live: Live) -> dict[tuple[str, str], float]:
    """How many calls have failed, by method and error."""
    found = {}
    for family in live.server.registry.collect():
        if family.name == "gem_rpc_errors":
            found = {(one.labels["method"], one.labels["error"]): one.value for one in family.samples}
    return found


def nothing_is_served(live: Live) -> bool:
    return not live.on_loop(lambda: live.server.wiring.intake.calls._all)


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("a fault of the server")


@all_ways
def test_each_commit_is_measured_from_its_header_until_theta_is_sent_and_what_carries_them_is_not(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = CommitExchange._reply
    with running(way, lease_seconds=3600.0) as (live, wire):

        async def slow(*arguments: Any) -> None:
            await send(*arguments)
            live.clock.ahead += PAUSE

        worker = wire.started("worker")
        monkeypatch.setattr(CommitExchange, "_reply", slow)
        stream = worker.stream()
        for _ in range(2):
            worker.commit_on(stream)
        stream.half_close()
        assert stream.ended_well()
        wait_until(lambda: nothing_is_served(live), "the stream to end")
        count, total = measured(live, "Commit")
        assert count == 2
        assert 2 * PAUSE <= total < 2 * PAUSE + REAL
        assert errors(live) == {}


@all_ways
def test_a_rejected_commit_is_an_error_and_takes_time_too(way: str) -> None:
    with running(way) as (live, wire):
        worker = wire.started("worker")
        assert worker.whole(worker.header(sequence=9), *worker.body()).refusal().error == "SEQUENCE_GAP"
        wait_until(lambda: nothing_is_served(live), "the stream to end")
        assert errors(live) == {("Commit", "SequenceGap"): 1}
        assert measured(live, "Commit")[0] == 1


@pytest.mark.parametrize(("way", "error"), [("grpc", "LeaseEnded"), ("tcp", "LeaseEnded"), ("tcp", CANCELLED)])
def test_a_commit_that_is_cut_short_says_by_whom(way: str, error: str) -> None:
    """A stream of gRPC whose client goes may look as if it had ended: then the gradient is an IncompleteTransfer."""
    with running(way) as (live, wire):
        worker = wire.started("worker", LARGE)
        stream = read_by_the_server(live, worker, worker.header(), chunks(worker.gradient())[0])
        if error == CANCELLED:
            stream.cancel()
        else:
            worker.leave()
        wait_until(lambda: errors(live) == {("Commit", error): 1}, "the error to be counted")


@all_ways
def test_a_fault_of_the_server_in_a_commit_is_internal(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(way) as (live, wire):
        worker = wire.started("worker")
        stream = worker.stream()
        monkeypatch.setattr(Core, "admit", broken)
        with pytest.raises((*FAILED, EOFError, OSError)):
            worker.commit_on(stream)
        wait_until(lambda: errors(live) == {("Commit", INTERNAL): 1}, "the error to be counted")


def test_a_call_is_measured_and_its_error_named(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with wired(live) as wire:
        worker = wire.started("worker")
        wait_until(lambda: nothing_is_served(live), "the pull to end")
        assert [measured(live, method)[0] for method in ("RegisterWorker", "InitializeCentral", "Pull")] == [1, 1, 1]
        wire.call("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id))
        wire.refusal("RenewLease", pb.RenewLeaseRequest(lease_id="nobody's"))
        monkeypatch.setattr(Core, "renew", broken)
        wire.refusal("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id))
        assert errors(live) == {("RenewLease", "LeaseEnded"): 1, ("RenewLease", INTERNAL): 1}
        assert measured(live, "RenewLease")[0] == 3
        assert measured(live, "Commit")[0] == 0


def test_a_call_that_its_client_gives_up_is_cancelled_after_the_time_that_it_waited(live: Live) -> None:
    """Bob waits for θ, which ann does not give its first value."""
    with wired(live) as wire:
        wire.join("ann")
        bob = wire.join("bob")
        pull = bob.open_pull()
        wait_until(lambda: not nothing_is_served(live), "the call to begin")
        live.clock.ahead += PAUSE
        pull.cancel()
        wait_until(lambda: errors(live) == {("Pull", CANCELLED): 1}, "the error to be counted")
        assert measured(live, "Pull")[0] == 1
        assert PAUSE <= measured(live, "Pull")[1] < PAUSE + REAL


# -- on the network


@through_sockets
def test_a_gradient_is_on_the_network_from_its_turn_to_its_last_byte(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ann stops in the middle. Bob, who waits for his turn meanwhile, is then fast."""
    monkeypatch.setattr(turns, "FIRST", 10 * PAUSE)
    monkeypatch.setattr(turns, "LONGEST", 10 * PAUSE)
    begin = turns.Turns.begin
    from_afar = lambda queue, client, nbytes, nearby=False: begin(queue, client, nbytes)  # noqa: E731
    monkeypatch.setattr(turns.Turns, "begin", from_afar)
    with running(way, lease_seconds=3600.0) as (live, wire):
        ann, bob = wire.started("ann", LARGE), wire.join("bob", LARGE)
        bob.pull()
        first, *rest = chunks(ann.gradient(), size=1 << 18)
        begun = read_by_the_server(live, ann, ann.header(), first)
        waiting = bob.stream(bob.header(), *bob.body())
        wait_until(lambda: live.on_loop(lambda: len(live.server.wiring.uploads._waiting)), "bob to wait")
        live.clock.ahead += PAUSE
        begun.send(*rest)
        # At the same time: either's θ may come first, and the other one's waits until it is read.
        reading = [in_background(partial(stream.answer, LARGE.size)) for stream in (begun, waiting)]
        for answer in reading:
            answer.result(DEADLINE)
        for name in ("gem_commit_wire_seconds", "gem_commit_turn_wait_seconds"):
            wait_until(lambda: seconds(live, name, "up")[0] == 2, "both to be counted")  # noqa: B023
            total = seconds(live, name, "up")[1]
            assert PAUSE <= total < PAUSE + REAL, name


@through_sockets
def test_theta_is_on_the_network_until_the_system_has_taken_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(way, lease_seconds=3600.0) as (live, wire):
        worker = wire.started("worker")
        where, name = (Connection, "send_theta") if way == "tcp" else (Transfer, "send_theta")
        send = getattr(where, name)

        def slow(*arguments: Any, **named: Any) -> Any:
            live.clock.ahead += PAUSE
            return send(*arguments, **named)

        monkeypatch.setattr(where, name, slow)
        stream = worker.stream()
        for _ in range(2):
            worker.commit_on(stream)
        wait_until(lambda: seconds(live, "gem_commit_wire_seconds", "down")[0] == 2, "both to be counted")
        assert 2 * PAUSE <= seconds(live, "gem_commit_wire_seconds", "down")[1] < 2 * PAUSE + REAL
        assert seconds(live, "gem_commit_wire_seconds", "up")[1] < REAL


@linux_only
def test_what_goes_through_shared_memory_is_not_on_the_network() -> None:
    with running("memory") as (live, wire):
        wire.started("worker").commit()
        for name in ("gem_commit_wire_seconds", "gem_commit_turn_wait_seconds"):
            assert [seconds(live, name, direction) for direction in ("up", "down")] == [(0, 0)] * 2


@pytest.mark.parametrize(("lane", "workers"), [("127.0.0.1:0", 1), ("", 0)])
def test_a_worker_over_grpc_has_fallen_back_only_if_there_is_a_lane(lane: str, workers: int) -> None:
    with running("grpc", lane_listen=lane) as (live, wire):
        wire.started("worker").commit()
        assert live.metric("gem_fallen_back_workers") == workers
