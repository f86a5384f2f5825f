"""A client whose bytes never end: it has no claim to a thread, so the others are served and looked after meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.v1 import lane_pb2
from gem_api.wire import FLOAT32
from gem_api.worker_theta import WorkerTheta
from gem_server.event_loop import Lent
from gem_server.intake.calls import PeerLeft
from gem_server.lane import lane as lane_module
from gem_server.lane.commits import _Lane, take_over
from gem_server.lane.connection import HELLO_SECONDS, TURN_BYTES, Connection
from gem_server.lane.reactor import Wait
from gem_server.telemetry.progress import Traffic
from kit.certificates import Encryption
from kit.model import in_background
from kit.raw_client import Wire, Worker, received_bytes, wired
from kit.raw_lane import RENEW, RawLane, committed, message, opened, opened_in_memory, tcp
from kit.regions import abstract
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.ways import IN_MEMORY

SIGNS = message(RENEW, lane_pb2.LaneRenewal().SerializeToString()) * 10_000


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server with one thread for each kind of lane."""
    monkeypatch.setattr(lane_module, "NETWORK_THREADS", 1)
    with serving(config(memory_socket=abstract())) as server:
        yield server


@contextmanager
def flooded(live: Live, lane: RawLane) -> Iterator[None]:
    """Signs of life on a lane, as many as the server takes, until the block ends."""
    before, done = received_bytes(live), threading.Event()

    def flood() -> None:
        with suppress(OSError):
            while not done.is_set():
                lane.sock.sendall(SIGNS)

    flooding = in_background(flood)
    wait_until(lambda: received_bytes(live) > before + len(SIGNS), "the flood to arrive")
    try:
        yield
    finally:
        done.set()
        lane.close()
        flooding.exception(DEADLINE)


@pytest.mark.parametrize("way", ["tcp", IN_MEMORY])
def test_a_lane_that_always_has_a_message_waiting_leaves_others_their_turn(way: str, live: Live, wire: Wire) -> None:
    open_lane = opened if way == "tcp" else opened_in_memory
    honest = wire.started("honest")
    with open_lane(honest) as lane, flooded(live, open_lane(wire.join("loud"))):
        for version in range(1, 4):
            assert committed(honest, lane)[0].version == version


def test_an_encrypted_lane_that_always_has_a_message_waiting_does_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "NETWORK_THREADS", 1)
    tls = Encryption(tmp_path)
    with serving(config(tls=tls.files)) as live, wired(live, credentials=tls.credentials) as wire:
        honest = wire.started("honest")
        with opened(honest, tls.context) as lane, flooded(live, opened(wire.join("loud"), tls.context)):
            for version in range(1, 4):
                assert committed(honest, lane)[0].version == version


def test_the_time_of_others_is_up_though_a_lane_always_has_a_message_waiting(live: Live, worker: Worker) -> None:
    with tcp(live.server.wiring.lane.listener.port) as silent, flooded(live, opened(worker)):
        live.clock.advance(HELLO_SECONDS + 1)
        assert silent.closed()


# -- long messages


class Endless:
    """A socket whose other end is faster than the server."""

    family = None

    def recv_into(self, into: memoryview) -> int:
        return len(into)

    def sendmsg(self, parts: list[memoryview]) -> int:
        return min(sum(map(len, parts)), 1 << 20)


def turns(steps: Iterator[Any]) -> int:
    waits = list(steps)
    assert set(waits) <= {Wait.TURN}
    return len(waits)


LONG = np.ones(3 * TURN_BYTES // 4, np.float32)


def test_a_long_message_leaves_others_their_turn() -> None:
    connection: Any = Connection(Endless(), Traffic(), lambda: 0.0)  # type: ignore[arg-type]
    assert turns(connection.receive(FLOAT32, LONG.copy(), lambda piece: None, None)) == 3
    assert turns(connection.send_theta(b"", LONG, FLOAT32)) == 3


def test_a_long_gradient_in_shared_memory_leaves_others_their_turn() -> None:
    assert turns(take_over(LONG, LONG, lambda piece: None)) == 3


# -- a lane that a newer call has stopped


class Woken:
    """Stands for what the reactor knows of a connection."""

    give_up_at = None

    def wake(self) -> None: ...


@pytest.fixture
def stoppable() -> Iterator[Connection]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        connection = Connection(ours, Traffic(), lambda: 0.0)
        connection.served = Woken()  # type: ignore[assignment]
        yield connection


def test_a_lane_that_is_stopped_when_its_turn_comes_does_not_take_it(stoppable: Connection) -> None:
    turn: Any = Future()
    waiting = stoppable.done(turn)
    next(waiting)
    turn.set_result("turn")
    stoppable.stop()
    with pytest.raises(PeerLeft):
        next(waiting)


def test_a_lane_that_is_stopped_before_it_holds_the_lock_again_does_not_take_its_turn_either(stoppable: Connection) -> None:
    class NewerCallFirst(Lent):
        def __exit__(self, *exception: object) -> None:
            super().__exit__(*exception)
            stoppable.stop()

    lock = threading.Lock()
    turn: Any = Future()
    turn.set_result("turn")
    checks: Any = None  # waits for nothing
    with lock, pytest.raises(PeerLeft):
        next(_Lane(stoppable, None, checks, NewerCallFirst(lock)).wait(turn))


@pytest.mark.parametrize("is_difference", [False, True], ids=["whole", "difference"])
def test_a_stopped_lane_changes_nothing_of_what_its_worker_is_known_to_hold(is_difference: bool, stoppable: Connection) -> None:
    held = WorkerTheta(600)
    held.sequence = 4
    older, newer = held.next_format(5, is_difference), held.next_format(5, True)  # two calls of a lease that repeat a commit
    stoppable.stop()
    with pytest.raises(PeerLeft):
        list(stoppable.send_theta(b"header", np.ones(600, np.float32), older))
    assert held.sequence == 4
    assert not held.theta.any()
    assert any(piece.any() for piece in newer.pieces(np.ones(600, np.float32)))


def test_a_lane_that_is_stopped_while_it_sends_theta_leaves_it_as_incomplete(stoppable: Connection) -> None:
    """What a newer call then sends is whole."""
    held = WorkerTheta(3_000_000)
    held.sequence = 4
    sending = stoppable.send_theta(b"header", np.ones(held.theta.size, np.float32), held.next_format(5, True))
    assert next(sending) is Wait.WRITE
    stoppable.stop()
    with pytest.raises(PeerLeft):
        list(sending)
    assert held.sequence == 0
