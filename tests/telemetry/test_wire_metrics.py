"""The time that commits are on the network, and wait for their turn on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gem_server.intake import turns
from gem_server.lane.connection import Connection
from gem_server.rpc.tensor_stream import Transfer
from kit.raw_client import chunks
from kit.regions import LARGE
from kit.server import Live, wait_until
from kit.ways import IN_MEMORY, read_by_the_server, running, through_sockets

PAUSE, REAL = 30.0, 15.0  # seconds by which a test moves the clock, and less than which everything else takes


def seconds(live: Live, name: str, direction: str) -> tuple[float, float]:
    """How many values a histogram has for a direction, and their sum."""
    count, total = (
        live.server.registry.get_sample_value(f"{name}_{kind}", {"direction": direction}) for kind in ("count", "sum")
    )
    assert count is not None
    assert total is not None
    return count, total


def both_counted(live: Live, name: str) -> bool:
    return seconds(live, name, "up")[0] == 2


def slowly(live: Live, send: Callable[..., Any]) -> Callable[..., Any]:
    """`send`, which takes PAUSE by the server's clock."""

    def slow(*arguments: Any, **named: Any) -> Any:
        live.clock.ahead += PAUSE
        return send(*arguments, **named)

    return slow


@through_sockets
def test_a_gradient_is_on_the_network_from_its_turn_to_its_last_byte(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ann stops in the middle. Bob, who waits for his turn meanwhile, is then fast."""
    monkeypatch.setattr(turns, "FIRST", 10 * PAUSE)
    monkeypatch.setattr(turns, "LONGEST", 10 * PAUSE)
    begin = turns.Turns.begin
    monkeypatch.setattr(
        turns.Turns, "begin", lambda queue, client, nbytes, nearby=False: begin(queue, client, nbytes)
    )  # from afar
    with running(way, lease_seconds=3600.0) as (live, wire):
        ann, bob = wire.started("ann", LARGE), wire.join("bob", LARGE)
        bob.pull()
        first, *rest = chunks(ann.gradient(), size=1 << 18)
        begun = read_by_the_server(live, ann, ann.header(), first)
        waiting = bob.stream(bob.header(), *bob.body())
        wait_until(lambda: live.on_loop(lambda: len(live.server.wiring.uploads._waiting)), "bob to wait")
        live.clock.ahead += PAUSE
        begun.send(*rest)
        for stream in (begun, waiting):
            stream.answer(LARGE.size)
        for name in ("gem_commit_wire_seconds", "gem_commit_turn_wait_seconds"):
            wait_until(partial(both_counted, live, name), "both to be counted")
            total = seconds(live, name, "up")[1]
            assert PAUSE <= total < PAUSE + REAL, name


@through_sockets
def test_theta_is_on_the_network_until_the_system_has_taken_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(way, lease_seconds=3600.0) as (live, wire):
        worker = wire.started("worker")
        where, name = (Connection, "send_theta") if way == "tcp" else (Transfer, "send_theta")
        monkeypatch.setattr(where, name, slowly(live, getattr(where, name)))
        stream = worker.stream()
        for _ in range(2):
            worker.commit_on(stream)
        wait_until(lambda: seconds(live, "gem_commit_wire_seconds", "down")[0] == 2, "both to be counted")
        assert 2 * PAUSE <= seconds(live, "gem_commit_wire_seconds", "down")[1] < 2 * PAUSE + REAL
        assert seconds(live, "gem_commit_wire_seconds", "up")[1] < REAL


@pytest.mark.parametrize("way", [IN_MEMORY])
def test_what_goes_through_shared_memory_is_not_counted(way: str) -> None:
    with running(way) as (live, wire):
        wire.started("worker").commit()
        for name in ("gem_commit_wire_seconds", "gem_commit_turn_wait_seconds"):
            assert [seconds(live, name, direction) for direction in ("up", "down")] == [(0, 0)] * 2


@pytest.mark.parametrize(("lane", "workers"), [("127.0.0.1:0", 1), ("", 0)])
def test_a_worker_over_grpc_has_fallen_back_only_if_there_is_a_lane(lane: str, workers: int) -> None:
    with running("grpc", lane_listen=lane) as (live, wire):
        wire.started("worker").commit()
        assert live.server.registry.get_sample_value("gem_fallen_back_workers") == workers
