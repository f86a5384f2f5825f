"""How a lane ends with an error: the client gets the error whatever it is doing, and the server holds nothing for long.

A socket that is closed with unread bytes resets the connection, and a client may then lose what it has not read. So these
tests look for the reset: a send that fails, or anything but a plain end after the error.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_api.v1 import admin_pb2, tensors_pb2
from gem_server.lane import connection, reactor
from gem_server.lane.connection import HELLO_SECONDS
from gem_server.lane.lane import Lane
from kit.certificates import Encryption
from kit.model import in_background
from kit.raw_client import SMALL, Refusal, Wire, Worker, apply_thread_held, received_bytes, wired
from kit.raw_lane import PREFIX, RESULT, LaneFailed, RawLane, committed, header, opened, opened_in_memory
from kit.regions import queue_length
from kit.server import DEADLINE, Live, serving, wait_until
from kit.ways import IN_MEMORY, configured

LARGE = Layout.of({"w": (4_000_000,)})  # more than any buffer between the two takes
over_the_network = pytest.mark.parametrize("way", ["tcp", "tls"])
every_way = pytest.mark.parametrize("way", ["tcp", "tls", IN_MEMORY])
without_tls = pytest.mark.parametrize("way", ["tcp", IN_MEMORY])


class Setting:
    """A server, its first worker, and how that opens its lanes. `close` ends the lanes."""

    def __init__(self, live: Live, wire: Wire, way: str, layout: Layout, context: ssl.SSLContext | None) -> None:
        self.live, self.wire = live, wire
        self.worker: Worker = wire.started("worker", layout)
        self._way, self._context = way, context
        self.lanes = ExitStack()

    def lane(self) -> RawLane:
        opener = opened_in_memory if self._way == "memory" else lambda worker: opened(worker, self._context)
        return self.lanes.enter_context(opener(self.worker))


Begin = Callable[..., Setting]


@pytest.fixture
def begin(way: str, tmp_path: Path) -> Iterator[Begin]:
    """Starts the server of a way."""
    with ExitStack() as stack:

        def start(layout: Layout = SMALL) -> Setting:
            tls = Encryption(tmp_path) if way == "tls" else None
            settings = configured(way, tls=tls.files if tls else None)
            live = stack.enter_context(serving(settings))
            wire = stack.enter_context(wired(live, credentials=tls.credentials if tls else None))
            setting = Setting(live, wire, way, layout, tls.context if tls else None)
            stack.enter_context(setting.lanes)
            return setting

        yield start


ENDS: dict[str, Callable[[Setting], object]] = {
    "LEASE_ENDED": lambda setting: setting.worker.leave(),
    "SUPERSEDED": lambda setting: setting.lane(),
    "DRAINING": lambda setting: setting.wire.call("Drain", admin_pb2.DrainRequest()),
}
every_end = pytest.mark.parametrize("end", ENDS)


def until_told(lane: RawLane) -> None:
    """Waits until something of the server has arrived, and reads nothing."""
    arrived = select.poll()
    arrived.register(lane.sock, select.POLLIN)
    assert arrived.poll(1000 * DEADLINE), "the server says nothing"


def plainly_ended(lane: RawLane) -> Refusal:
    """The error that ends the lane; nothing follows it, not even a reset."""
    with pytest.raises(LaneFailed) as failed:
        lane.receive()
    assert lane.sock.recv(1) == b""
    return failed.value.refusal


def payload_of(worker: Worker, lane: RawLane) -> bytes:
    """What follows the header of the worker's commit on this lane."""
    return b"" if lane.gradient is not None else worker.gradient().tobytes()


# -- the client is sending


@over_the_network
@every_end
def test_a_client_that_is_still_sending_can_send_all_and_gets_the_error(end: str, way: str, begin: Begin) -> None:
    setting = begin(LARGE)
    live, worker, lane = setting.live, setting.worker, setting.lane()
    gradient, before = worker.gradient().tobytes(), received_bytes(live)
    lane.commit(header(worker), gradient[:100], declared=len(gradient))
    wait_until(lambda: received_bytes(live) > before + 100, "the upload to begin")
    with apply_thread_held(live):  # a server that drains is still there
        ENDS[end](setting)
        until_told(lane)
        lane.send(gradient[100:])
        assert plainly_ended(lane).error == end


@over_the_network
def test_a_gradient_is_refused_as_soon_as_the_fault_is_seen_and_the_rest_may_follow(way: str, begin: Begin) -> None:
    setting = begin(LARGE)
    worker, lane = setting.worker, setting.lane()
    gradient = worker.gradient()
    gradient[5] = np.nan
    data = gradient.tobytes()
    lane.commit(header(worker), data[: 2 << 20], declared=len(data))
    until_told(lane)
    lane.send(data[2 << 20 :])
    assert plainly_ended(lane).error == "NON_FINITE_GRADIENT"
    assert committed(worker, setting.lane())[0].version == 1


@every_way
@every_end
def test_a_commit_that_crosses_the_error_gets_it(end: str, way: str, begin: Begin) -> None:
    """The lane was idle, so the client has not looked at it before it sends."""
    setting = begin()
    worker, lane = setting.worker, setting.lane()
    with apply_thread_held(setting.live):  # a server that drains is still there
        ENDS[end](setting)
        until_told(lane)
        lane.commit(header(worker), payload_of(worker, lane))
        assert plainly_ended(lane).error == end


@over_the_network
def test_a_shutdown_hears_out_a_client_that_is_still_sending(way: str, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((connection, "QUIET_SECONDS"), (reactor, "GRACE_SECONDS")):
        monkeypatch.setattr(module, name, DEADLINE)  # for a slow machine
    setting = begin(LARGE)
    live, worker, lane = setting.live, setting.worker, setting.lane()
    gradient, before = worker.gradient().tobytes(), received_bytes(live)
    lane.commit(header(worker), gradient[:100], declared=len(gradient))
    wait_until(lambda: received_bytes(live) > before + 100, "the upload to begin")
    stopping = in_background(live.stop)
    until_told(lane)
    lane.send(gradient[100:])
    assert plainly_ended(lane).error == "DRAINING"
    lane.close()
    stopping.result(DEADLINE)


# -- the client waits


@every_way
def test_a_client_that_waits_in_the_queue_gets_the_error_at_once(way: str, begin: Begin) -> None:
    setting = begin()
    live, worker, lane = setting.live, setting.worker, setting.lane()
    payload = payload_of(worker, lane)
    with apply_thread_held(live):
        for _ in range(2):  # the second is too early: nobody reads it
            lane.commit(header(worker), payload)
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        worker.leave()
        assert plainly_ended(lane).reason == "left"
        lane.close()
        wait_until(lambda: setting.live.lanes == 0, "the connection to end")


class Paused(socket.socket):
    """A socket of the server. It is held between sending a result and noticing that it has sent it."""

    sent: threading.Event
    go_on: threading.Event

    def sendmsg(self, buffers: Any, *arguments: Any) -> int:
        count = super().sendmsg(buffers, *arguments)
        if bytes(buffers[0][:6]) == b"GEML\1" + bytes([RESULT]):
            Paused.sent.set()
            assert Paused.go_on.wait(DEADLINE)
        return count


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Paused]]:
    serve = Lane._serve
    monkeypatch.setattr(Lane, "_serve", lambda lane, sock: serve(lane, Paused(fileno=sock.detach())))
    Paused.sent, Paused.go_on = threading.Event(), threading.Event()
    yield Paused
    Paused.go_on.set()


@without_tls
def test_a_lease_that_ends_right_after_its_result_was_sent_is_told_so(way: str, paused: type[Paused], begin: Begin) -> None:
    """The client has its result, and leaves, before the server's thread knows that all is sent."""
    setting = begin()
    worker, lane = setting.worker, setting.lane()
    assert committed(worker, lane)[0].version == 1
    assert paused.sent.wait(DEADLINE)
    calls = setting.live.server.wiring.intake.calls
    leaving = in_background(worker.leave)
    wait_until(lambda: leaving.done() or any(call.error for call in list(calls._all)), "the lease to end")
    paused.go_on.set()
    leaving.result(DEADLINE)
    assert plainly_ended(lane).reason == "left"


@over_the_network
@pytest.mark.parametrize("dtype", ["FLOAT32", "BFLOAT16"])
def test_no_error_is_sent_inside_a_result_that_is_cut_off(dtype: str, way: str, begin: Begin) -> None:
    """It would be taken for the rest of θ."""
    setting = begin(LARGE)
    live, worker, lane = setting.live, setting.worker, setting.lane()
    before = live.sent_bytes + 1000  # more than the result
    lane.commit(header(worker, theta_dtype=tensors_pb2.WireDtype.Value(f"WIRE_DTYPE_{dtype}")), worker.gradient().tobytes())
    wait_until(lambda: live.sent_bytes > before, "the answer to begin")
    worker.leave()
    prefix = lane.exactly(PREFIX)
    lane.exactly(int.from_bytes(prefix[8:12], "little"))
    declared, came = int.from_bytes(prefix[12:20], "little"), bytearray()
    while data := lane.sock.recv(1 << 20):
        came += data
    assert 0 < len(came) < declared
    assert len(np.unique(np.frombuffer(came[: len(came) // 4 * 4], "<u4"))) == 1


# -- the client does not go


@every_way
def test_a_client_that_never_closes_is_closed(way: str, begin: Begin) -> None:
    setting = begin()
    lane = setting.lane()
    setting.worker.leave()
    assert plainly_ended(lane).reason == "left"
    assert setting.live.lanes == 1
    setting.live.clock.advance(HELLO_SECONDS + 1)
    wait_until(lambda: setting.live.lanes == 0, "the connection to end")


@every_way
def test_a_client_that_never_stops_sending_is_cut_off(way: str, begin: Begin) -> None:
    setting = begin()
    lane = setting.lane()
    setting.worker.leave()
    with pytest.raises((ConnectionError, ssl.SSLEOFError)):
        lane.send(*[bytes(1 << 20)] * 100)
    wait_until(lambda: setting.live.lanes == 0, "the connection to end")
