"""A lane that can't be opened, or that breaks: the transport is chosen anew, and each commit is applied once."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from client.conftest import trained
from gem_api.lane import PREFIX_BYTES, Kind, opening, parse_prefix
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_client import Draining, ServerUnavailable, connect
from gem_client.transport import connection, pulse
from gem_client.transport import lane as client_lane
from gem_client.transport.commit_stream import CommitStream
from kit.listening import answering
from kit.model import (
    ELSEWHERE,
    GRADIENT,
    PLAIN,
    Patience,
    Relay,
    Wire,
    expire_all,
    in_background,
    lane_port_of,
    model,
    outcomes,
    theta,
    transports,
    version,
)
from kit.regions import linux_only
from kit.server import DEADLINE, Live, config, serving, wait_until

FIREWALLS = ["refuses", "drops every packet", "lets connections be made and nothing else"]


@contextmanager
def firewall(kind: str, live: Live) -> Iterator[str]:
    """An address of the server where gRPC works, and the lane's port does not."""
    with Wire(live.address) as wire, ExitStack() as sockets:
        place = ELSEWHERE, lane_port_of(live)
        if kind == "drops every packet":
            sockets.enter_context(dropping(place))
        elif kind != "refuses":
            sockets.enter_context(socket.create_server(place, backlog=0))
        yield wire.address


@contextmanager
def dropping(place: tuple[str, int]) -> Iterator[None]:
    """Drops what comes to a port, as the system does when nobody accepts connections and its queue is full."""
    with socket.create_server(place, backlog=0), socket.create_connection(place):
        with pytest.raises(TimeoutError):
            socket.create_connection(place, timeout=0.1)
        yield


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for a lane that does not answer."""
    assert 1 <= client_lane.CONNECT_SECONDS <= 5, "long enough for a far server, and seconds for whoever waits"
    monkeypatch.setattr(client_lane, "CONNECT_SECONDS", 0.2)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", FIREWALLS)
def test_behind_a_firewall_commits_go_over_grpc_and_the_log_says_so_once(
    kind: str, live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with firewall(kind, live) as address, connect(address, name="ann") as session:
        session.join(model())
        for _ in range(3):
            np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert transports(live) == {"ann": "grpc"}
    (warning,) = warnings_of(caplog)
    assert warning.startswith("commits go over gRPC, which is slower: can't open a lane (")


def test_the_next_lease_tries_the_lane_again(live: Live) -> None:
    with Wire(live.address) as wire, connect(wire.address) as session:
        session.join(model())
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "grpc"}
        port = lane_port_of(live)
        opened = Relay(socket.create_server((ELSEWHERE, port)), ("127.0.0.1", port))
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "grpc"}, "a lease that could open no lane does not try at every commit"
        expire_all(live)
        assert session.commit(GRADIENT).lost
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "tcp"}
        opened.refuse()


def test_a_server_without_a_lane_is_no_matter_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving(config(PLAIN, lane_listen="")) as live, connect(live.address) as session:
        session.join(model())
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert transports(live) == {session.name: "grpc"}
    assert warnings_of(caplog) == []


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, calls: Container[int] = (1,)) -> None:
    """Has these calls of a function fail, counted from 1."""
    function, number = getattr(owner, name), itertools.count(1)

    def call(*arguments: Any, **settings: Any) -> Any:
        if next(number) in calls:
            raise error
        return function(*arguments, **settings)

    monkeypatch.setattr(owner, name, call)


def test_a_server_that_shuts_down_before_the_lane_is_open_is_asked_for_another(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, connection, "open_network_lane", Draining("the server is shutting down"))
    with connect(live.address, retry=Patience().retry()) as session:
        session.join(model())
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "tcp"}


@pytest.mark.parametrize(("broken", "after"), [((1, 3), "grpc"), ((1, 2), "tcp")])
def test_a_worker_over_grpc_chooses_anew_once_the_server_was_away(
    broken: tuple[int, ...], after: str, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for a stream that broke now and then, as behind a proxy: to try a port that drops packets takes seconds."""
    with Wire(live.address, live) as wire, connect(wire.address, retry=Patience().retry()) as session:
        failing(monkeypatch, connection, "open_network_lane", ConnectionRefusedError())
        session.join(model())
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "grpc"}
        failing(monkeypatch, CommitStream, "exchange", ServerUnavailable("the stream broke"), broken)
        assert [session.commit(GRADIENT).version for _ in range(2)] == [2, 3]
        assert (transports(live), session.generation) == ({session.name: after}, 1)
        assert outcomes(live) == {"applied": 3}


# -- lanes that break


@linux_only
@pytest.mark.parametrize(("lanes", "after"), [("tcp", "grpc"), ("memory", "grpc"), ("both", "tcp")])
def test_a_commit_whose_lane_breaks_for_good_goes_on_another_way_and_is_applied_once(
    lanes: str, after: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer is lost, and the lane can't be opened again. In the last case the memory alone is gone."""
    settings: dict[str, Any] = {"memory_socket": str(tmp_path / "s") if lanes != "tcp" else ""}
    if lanes == "memory":
        settings["lane_listen"] = ""
    with serving(config(PLAIN, **settings)) as live, trained(live, Patience()) as (wire, session):
        assert transports(live) == {session.name: "tcp" if lanes == "tcp" else "memory"}
        relay = wire.lanes[-1]
        relay.lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 2, "the commit to be applied")
        relay.refuse()
        answer = waiting.result(DEADLINE)
        assert (answer.version, answer.lost, session.generation) == (2, False, 1)
        np.testing.assert_array_equal(answer.theta, [0.5] * 6 + [-0.5] * 3)
        assert outcomes(live) == {"applied": 2, "repeated": 1}
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert transports(live) == {session.name: after}
    assert [("can't open a lane" in warning) for warning in warnings_of(caplog)].count(True) == (after == "grpc")


def test_while_grpc_does_not_answer_either_a_broken_lane_is_waited_for(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is away: no reason to do without the lane for the rest of the lease."""
    with trained(live, Patience()) as (wire, session):
        stub = session._member.links.leader.connection._stub
        failing(monkeypatch, stub, "OpenLane", ServerUnavailable("no server"))
        wire.lanes[0].cut()
        assert session.commit(GRADIENT).version == 2
        assert (transports(live), outcomes(live)) == ({session.name: "tcp"}, {"applied": 2})


@linux_only
def test_a_reply_lost_on_the_network_is_read_from_newly_shared_memory(tmp_path: Path) -> None:
    """The commit went over TCP: the server has not used the memory yet."""
    place, away = tmp_path / "s", tmp_path / "away"
    with serving(config(PLAIN, memory_socket=str(place))) as live, Wire(live.address, live) as wire:
        place.rename(away)
        with connect(wire.address, retry=Patience().retry()) as session:
            session.join(model())
            session.commit(GRADIENT)
            assert transports(live) == {session.name: "tcp"}
            wire.lanes[0].lose_answers()
            waiting = in_background(lambda: session.commit(GRADIENT))
            wait_until(lambda: version(live) == 2, "the commit to be applied")
            away.rename(place)
            wire.lanes[0].cut()
            answer = waiting.result(DEADLINE)
            assert session.shares_memory
            np.testing.assert_array_equal(answer.theta, [0.5] * 6 + [-0.5] * 3)
            assert outcomes(live) == {"applied": 2, "repeated": 1}
            np.testing.assert_array_equal(session.commit(GRADIENT).theta, [0.25] * 6 + [-0.75] * 3)
            assert transports(live) == {session.name: "memory"}


@pytest.mark.usefixtures("soon")
def test_a_lane_that_stalls_is_given_up_and_what_it_held_back_changes_nothing(live: Live) -> None:
    with trained(live, Patience(), timeout=1.0) as (wire, session):
        for relay in wire.lanes:
            relay.stall()
        answer = in_background(lambda: session.commit(GRADIENT)).result(DEADLINE)
        assert (answer.version, answer.lost) == (2, False)
        assert transports(live) == {session.name: "grpc"}
        wire.flow()
        assert session.commit(GRADIENT).version == 3
        assert (session.generation, outcomes(live)["applied"], version(live)) == (1, 3, 3)


def test_lanes_that_open_and_then_break_are_given_up(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """As behind a filter that lets short messages through. The commit does not wait until the session gives up."""
    said: list[bytes] = []

    def welcome(visitor: socket.socket) -> None:
        said.append(visitor.recv(4096))
        visitor.sendall(opening(Kind.WELCOME, lane_pb2.LaneWelcome()))
        said.append(visitor.recv(4096))

    with (
        Wire(live.address) as wire,
        answering(socket.create_server((ELSEWHERE, lane_port_of(live))), welcome),
        connect(wire.address, retry=Patience().retry()) as session,
    ):
        session.join(model())
        for done in range(1, 4):
            assert in_background(lambda: session.commit(GRADIENT)).result(DEADLINE).version == done
        assert transports(live) == {session.name: "grpc"}
        assert len(said) == 4, "a hello and a commit on each of two lanes"
        assert outcomes(live) == {"applied": 3}
    assert [warning for warning in warnings_of(caplog) if "lanes open and then break" in warning] != []


# -- a port that falls silent in mid-run

LARGE = 3_000_000  # parameters: more than the system's buffers hold
PHASES = ["sending", "waiting", "receiving"]


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the waits, on a system that doesn't say when packets came."""
    monkeypatch.setattr(pulse, "silent_for", lambda sock: None)
    monkeypatch.setattr(client_lane, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "SILENT_SECONDS", 0.02)


@contextmanager
def halting(phase: str, live: Live, until: Callable[[], object]) -> Iterator[str]:
    """An address of the server whose lane stops in this phase of a commit, and goes on after `until` has returned."""

    def serve(visitor: socket.socket) -> None:
        visitor.recv(4096)
        visitor.sendall(opening(Kind.WELCOME, lane_pb2.LaneWelcome()))
        theta, result = bytes(4 * LARGE), opening(Kind.RESULT, pb.CommitResult(base_version=7), 4 * LARGE)
        if phase == "sending":
            until()
        prefix = parse_prefix(visitor.recv(PREFIX_BYTES, socket.MSG_WAITALL))
        visitor.recv(prefix.header + prefix.payload, socket.MSG_WAITALL)
        if phase == "waiting":
            until()
        visitor.sendall(result + theta[LARGE:])
        if phase == "receiving":
            until()
        visitor.sendall(theta[:LARGE])

    with Wire(live.address) as wire, answering(socket.create_server((ELSEWHERE, lane_port_of(live))), serve):
        yield wire.address


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize(("phase", "system"), [*((phase, "linux") for phase in PHASES), ("waiting", "darwin")])
def test_a_lane_that_waits_is_not_given_up(phase: str, system: str, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for its turn, for a slow rule, or for a checkpoint."""
    monkeypatch.setattr(client_lane, "sys", SimpleNamespace(platform=system))
    tries: list[object] = []

    def connects(*place: object) -> bool:
        tries.append(place)
        return True

    monkeypatch.setattr(pulse, "_connects", connects)
    waited = partial(wait_until, lambda: len(tries) >= 3, "the lane to look for a pulse")
    with halting(phase, live, waited) as address, connect(address) as session:
        session.join({"w": np.zeros(LARGE, np.float32)})
        answer = session.commit(np.ones(LARGE, np.float32))
        assert (answer.version, session.transport, version(live)) == (7, "tcp", 0)


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("phase", PHASES)
def test_a_lane_whose_port_falls_silent_leaves_its_commit_to_grpc(
    phase: str, live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[object] = []
    monkeypatch.setattr(pulse, "_connects", lambda *place: tries.append(place))
    over = threading.Event()
    with halting(phase, live, over.wait) as address, connect(address, retry=Patience().retry()) as session:
        session.join({"w": np.zeros(LARGE, np.float32)})
        failing(monkeypatch, connection, "open_network_lane", TimeoutError("timed out"), range(1, 100))
        answer = in_background(lambda: session.commit(np.ones(LARGE, np.float32))).result(DEADLINE)
        over.set()
        assert (answer.version, session.transport, session.generation) == (1, "grpc", 1)
        assert (len(tries), outcomes(live)) == (1, {"applied": 1})
    silent, fallen_back, again = warnings_of(caplog)
    assert "the server answers again, after" in again
    assert "the connection to the server broke: the server's port for it does not answer any more; trying again" in silent
    assert fallen_back.startswith("commits go over gRPC, which is slower: can't open a lane (")


def test_an_idle_lane_on_which_nothing_comes_renews_no_lease(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message might never arrive: `Connection.renew` then takes gRPC."""
    with trained(live, Patience()) as (_, session):
        lane = session._member.links.leader.connection.lane
        assert lane is not None
        for silent, renews in ((0.5, True), (10.0, False), (None, True)):
            monkeypatch.setattr(client_lane, "silent_for", lambda sock, silent=silent: silent)
            assert lane.renew() == renews
