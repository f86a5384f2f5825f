"""Who comes to the lane's port and to its Unix socket: tokens, connections that misbehave, and the socket's place."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_server.config import StartError
from gem_server.lane.connection import HELLO_SECONDS
from gem_server.lane.listener import TOKEN_SECONDS
from gem_server.lane.pending_connections import MAX_PENDING
from gem_server.lane.reactor import GRACE_SECONDS
from kit.raw_client import Wire, Worker, wired
from kit.raw_lane import COMMIT, HELLO, RENEW, WELCOME, LaneFailed, RawLane, committed, hello, message, offer, opened, tcp, unix
from kit.regions import ENDS, handed_over, memory_bytes, shared, shares
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.ways import all_lanes

pytestmark = pytest.mark.shared_memory  # the server has both kinds of lane


def connected(live: Live, way: str) -> RawLane:
    """A connection to the lane of that way."""
    if way == "memory":
        return unix(live.config.memory_socket)
    return tcp(live.server.wiring.lane.listener.port)


def pending(live: Live) -> int:
    """Connections that have not shown a token yet."""
    return live.on_loop(lambda: len(live.server.wiring.lane._pending))


def welcomed(lane: RawLane, way: str) -> bool:
    """Whether the server opens the lane; closes the connection."""
    if way == "memory":
        descriptor = handed_over(lane)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None
    with lane:
        try:
            return lane.receive()[0] == WELCOME
        except (LaneFailed, EOFError):
            return False


# -- tokens


@all_lanes
def test_a_token_is_good_for_one_lane_until_there_is_a_newer_one(way: str, live: Live, worker: Worker) -> None:
    older, newer = offer(worker).token, offer(worker).token
    assert older != newer
    for token, expected in ((older, False), (newer, True), (newer, False)):
        lane = connected(live, way)
        lane.send(hello(token))
        assert welcomed(lane, way) == expected
    assert shares(worker)


@all_lanes
def test_a_token_is_good_for_seconds(way: str, live: Live, worker: Worker) -> None:
    token = offer(worker).token
    live.clock.advance(TOKEN_SECONDS + 1)
    with connected(live, way) as lane:
        lane.send(hello(token))
        refusal = lane.refusal()
        assert (refusal.error, "ask for another" in refusal.details) == ("INVALID_REQUEST", True)


@all_lanes
@pytest.mark.parametrize("end", ENDS)
def test_a_token_of_a_lease_that_has_ended_gives_nothing(end: str, way: str, live: Live, worker: Worker) -> None:
    token = offer(worker).token
    if end == "expired":
        live.on_loop(lambda: setattr(live.core.leases.live[worker.lease_id], "expires_at", live.clock() + 1))
        live.clock.advance(2)
        wait_until(lambda: live.on_loop(lambda: worker.lease_id not in live.core.leases.live), "the lease to expire")
    else:
        ENDS[end](live, worker)
    before = memory_bytes(live)
    with connected(live, way) as lane:
        lane.send(hello(token))
        assert lane.refusal().error == "LEASE_ENDED"
    assert memory_bytes(live) == before
    again = worker.wire.join("again")
    assert shares(again)


def test_a_server_without_a_lane_says_so() -> None:
    with serving(config(memory_socket="", lane_listen="")) as live, wired(live) as wire:
        worker = wire.started("worker")
        refusal = wire.refusal("OpenLane", pb.OpenLaneRequest(lease_id=worker.lease_id))
        assert (refusal.error, "over gRPC" in refusal.details) == ("INVALID_REQUEST", True)
        assert worker.commit()[0].version == 1


def test_asking_for_a_lane_is_a_sign_of_life(live: Live, worker: Worker) -> None:
    live.clock.advance(0.6 * live.config.lease_seconds)
    offer(worker)
    live.clock.advance(0.6 * live.config.lease_seconds)
    live.on_loop(live.server.wiring.training.expire_leases)
    assert worker.commit()[0].version == 1


# -- connections of every kind

STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "says nothing": lambda token: b"",
    "says half a prefix": lambda token: hello(token)[:12],
    "says all but the last byte": lambda token: hello(token)[:-1],
    "says an empty token": lambda token: hello(b""),
    "has one bit wrong": lambda token: hello(token[:-1] + bytes([token[-1] ^ 1])),
    "says something before": lambda token: b"\0" + hello(token),
    "has a damaged prefix": lambda token: hello(token)[:9] + b"\1" + hello(token)[10:],
    "has another version": lambda token: message(HELLO, hello(token)[24:], version=2),
    "says another message": lambda token: message(COMMIT, hello(token)[24:]),
    "says a sign of life": lambda token: message(RENEW, b""),
    "says a kind that there is not": lambda token: message(99, hello(token)[24:]),
    "says a payload of 2**64 - 1 bytes": lambda token: message(HELLO, hello(token)[24:], 2**64 - 1),
    "says a header of 65,537 bytes": lambda token: message(HELLO, bytes(65_537)),
    "says no protobuf": lambda token: message(HELLO, b"\xff" * 20),
    "speaks HTTP": lambda token: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
}


@all_lanes
def test_a_stranger_gets_nothing_and_stops_no_one(way: str, live: Live, worker: Worker) -> None:
    before = memory_bytes(live)
    for kind, said in STRANGERS.items():
        lane = connected(live, way)
        with suppress(BrokenPipeError, ConnectionResetError):
            lane.send(said(offer(worker).token))
        lane.hang_up()
        assert not welcomed(lane, way), kind
    wait_until(lambda: (pending(live), live.lanes) == (0, 0), "the visits to end")
    assert memory_bytes(live) == before
    assert shares(worker)


def test_who_resets_the_connection_at_once_holds_nobody_up(live: Live, worker: Worker) -> None:
    """An error of one connection must not have the server wait before it accepts the next."""
    for _ in range(50):
        lane = connected(live, "tcp")
        lane.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        lane.close()
    with opened(worker) as lane:
        assert committed(worker, lane)[0].version == 1
    wait_until(lambda: live.lanes == 0, "the visits to end")


@all_lanes
@pytest.mark.parametrize("said", [b"", b"GEML", hello(bytes(16))[:-1]], ids=["nothing", "its first word", "nearly all"])
def test_a_visitor_has_ten_seconds_for_its_token(said: bytes, way: str, live: Live, worker: Worker) -> None:
    with connected(live, way) as lane:
        lane.send(said)
        wait_until(lambda: pending(live) == 1, "the visit to begin")
        live.clock.advance(HELLO_SECONDS - 0.5)
        lane.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            lane.sock.recv(1)
        live.clock.advance(1)
        lane.sock.settimeout(DEADLINE)
        assert lane.closed()  # though it never hangs up itself
    wait_until(lambda: (pending(live), live.lanes) == (0, 0), "the visit to end")


def test_bytes_one_at_a_time_give_a_visitor_no_more_time(live: Live, worker: Worker) -> None:
    with connected(live, "tcp") as lane:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server may have closed before the last
            for byte in hello(offer(worker).token)[:8]:
                lane.send(bytes([byte]))
                live.clock.advance(0.2 * HELLO_SECONDS)
        assert lane.closed()


@all_lanes
def test_an_open_lane_may_be_silent_for_as_long_as_its_lease_lasts(way: str, live: Live, worker: Worker) -> None:
    lane = opened(worker) if way == "tcp" else shared(worker).lane
    for _ in range(10):
        live.clock.advance(0.6 * live.config.lease_seconds)
        worker.wire.call("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id))
    lane.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        lane.sock.recv(1)
    lane.close()


@all_lanes
def test_hundreds_of_connections_that_say_nothing_hold_an_honest_one_up_for_a_moment(
    way: str, live: Live, worker: Worker
) -> None:
    """A bounded number of them is open; the oldest makes room for the next."""
    with wired(live) as far_wire, ExitStack() as stack:
        far = far_wire.join("far")
        for _ in range(2 * MAX_PENDING):
            stack.enter_context(connected(live, way))
        wait_until(lambda: pending(live) >= MAX_PENDING, "every place to be taken")
        assert live.lanes <= MAX_PENDING + 2  # an accepted connection of each kind may come on top
        assert far.commit()[0].version == 1
        result = worker.commit()[0]  # on a lane that is opened now
        assert result.version == 2
    wait_until(lambda: pending(live) == 0, "the visits to end")


@all_lanes
def test_a_hundred_workers_that_come_at_once_all_get_their_lane(way: str, live: Live, wire: Wire, worker: Worker) -> None:
    """However long the server is busy with something else meanwhile."""
    tokens = [offer(wire.join(f"worker {number}")).token for number in range(100)]
    with ExitStack() as stack:
        lanes = live.on_loop(lambda: [stack.enter_context(connected(live, way)) for _ in tokens])
        for lane, token in zip(lanes, tokens, strict=True):
            lane.send(hello(token))
        assert [welcomed(lane, way) for lane in lanes] == [True] * 100


def test_the_end_waits_for_no_silent_visitor(live: Live, worker: Worker) -> None:
    with ExitStack() as silent:
        for number in range(100):
            silent.enter_context(connected(live, "tcp" if number % 2 else "memory"))
        lane = silent.enter_context(opened(worker))
        wait_until(lambda: pending(live) == 100, "all to have come")
        assert worker.commit()[0].version == 1
        began = time.monotonic()
        live.stop()
        assert time.monotonic() - began < GRACE_SECONDS
        assert lane.refusal().error == "DRAINING"


# -- the socket's place


def started(address: str) -> int:
    """Starts a server there, has a worker share memory with it, and stops it. Returns the socket's mode."""
    with serving(config(memory_socket=address)) as live, wired(live) as wire:
        worker = wire.started("worker")
        assert offer(worker).socket == address
        assert shares(worker)
        return Path(address).stat().st_mode


def test_a_path_is_made_with_its_folder_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "s"
    mode = started(str(path))
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) & 0o666 == 0o666  # workers may run as another user
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_behind_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
        left_behind.listen()
    assert path.is_socket()
    started(str(path))
    assert not path.exists()


def test_a_path_that_another_server_answers_at_is_left_to_it(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with serving(config(memory_socket=path)) as live, wired(live) as wire:
        worker = wire.started("worker")
        with pytest.raises(StartError, match="another server answers"):
            Live(config(memory_socket=path))
        assert shares(worker)


def test_a_path_that_another_server_has_taken_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(config(memory_socket=str(path))) as first:
        path.unlink()
        with serving(config(memory_socket=str(path))) as second, wired(second) as wire:
            first.stop()
            assert path.is_socket()
            assert shares(wire.started("worker"))


def test_an_abstract_name_that_another_server_has_is_refused(live: Live, worker: Worker) -> None:
    with pytest.raises(StartError, match="memory_socket"):
        Live(config(memory_socket=live.config.memory_socket))
    assert shares(worker)


def a_file(path: Path) -> str:
    path.write_text("mine")
    return str(path)


def a_folder(path: Path) -> str:
    path.mkdir()
    return str(path)


WRONG_PLACES: dict[str, Callable[[Path], str]] = {
    "a file": a_file,
    "a folder": a_folder,
    "below a file": lambda path: f"{a_file(path)}/s",
    "longer than a socket's name may be": lambda path: str(path) + "x" * 108,
    "an abstract name that is too long": lambda path: "@" + "x" * 108,
}


@pytest.mark.parametrize("what", WRONG_PLACES)
def test_a_place_that_can_not_be_a_socket_is_refused_and_what_is_there_stays(what: str, tmp_path: Path) -> None:
    place = WRONG_PLACES[what](tmp_path / "s")
    before = {path: path.read_text() if path.is_file() else "" for path in tmp_path.iterdir()}
    with pytest.raises(StartError, match="memory_socket"):
        Live(config(memory_socket=place))
    assert {path: path.read_text() if path.is_file() else "" for path in tmp_path.iterdir()} == before


def test_a_server_that_can_not_start_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(StartError):
        Live(config(Hyperparameters(epochs=0, steps=0), memory_socket=str(path)))
    assert not path.exists()
