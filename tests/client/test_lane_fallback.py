"""A lane that can't be opened, or that breaks: it is opened again, or commits go over gRPC, each applied once."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gem_api.lane import PREFIX_BYTES, Kind, opening, parse_prefix
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_client import Draining, GemError, Session, connect
from gem_client.transport import lane as client_lane
from gem_client.transport import pulse
from gem_client.transport.connection import Connection
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


def test_a_server_that_shuts_down_before_the_lane_is_open_is_asked_for_another(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[GemError] = [Draining("the server is shutting down")]
    open_lane = client_lane.open_network_lane

    def once_too_late(*arguments: Any) -> client_lane.Lane:
        if errors:
            raise errors.pop()
        return open_lane(*arguments)

    monkeypatch.setattr("gem_client.transport.connection.open_network_lane", once_too_late)
    with connect(live.address, retry=Patience().retry()) as session:
        session.join(model())
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "tcp"}


# -- lanes that break


@contextmanager
def trained(live: Live, patience: Patience, **settings: Any) -> Iterator[tuple[Wire, Session]]:
    """A session with one commit, behind a network that can be broken."""
    with Wire(live.address, live) as wire, connect(wire.address, retry=patience.retry(), **settings) as session:
        session.join(model())
        session.commit(GRADIENT)
        yield wire, session


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
            assert session.commit(GRADIENT).version == done
        assert transports(live) == {session.name: "grpc"}
        assert len(said) == 4, "a hello and a commit on each of two lanes"
        assert outcomes(live) == {"applied": 3}
    assert [warning for warning in warnings_of(caplog) if "lanes open and then break" in warning] != []


# -- a port that falls silent in mid-run, and the way back

LARGE = 3_000_000  # parameters: more than the system's buffers hold
PHASES = ["sending", "waiting", "receiving"]


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the waits, on a system that doesn't say when packets came."""
    monkeypatch.setattr(pulse, "silent_for", lambda sock: None)
    monkeypatch.setattr(client_lane, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(pulse, "SILENT_SECONDS", 0.02)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease is renewed but by `renew`."""
    monkeypatch.setattr("gem_client.transport.background.Background.start", lambda self, seconds: None)


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
@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("phase", PHASES)
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
def test_a_lane_whose_port_falls_silent_is_given_up_at_once_for_grpc(
    phase: str, live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[object] = []
    monkeypatch.setattr(pulse, "_connects", lambda *place: tries.append(place))
    over = threading.Event()
    with halting(phase, live, over.wait) as address, connect(address, retry=Patience().retry()) as session:
        session.join({"w": np.zeros(LARGE, np.float32)})
        answer = in_background(lambda: session.commit(np.ones(LARGE, np.float32))).result(DEADLINE)
        over.set()
        assert (answer.version, session.transport, session.generation) == (1, "grpc", 1)
        assert len(tries) == 1, "neither the pulse nor the session tries a silent port again before gRPC"
        assert outcomes(live) == {"applied": 1}
    said = "commits go over gRPC, which is slower: the lane broke: the server's port for it does not answer any more"
    assert warnings_of(caplog)[0] == said


@contextmanager
def fallen_back(live: Live) -> Iterator[tuple[Session, Connection]]:
    """A session whose lane has gone silent in mid-run: the answer to a commit was lost, and gRPC has brought it."""
    with trained(live, Patience()) as (wire, session):
        wire.lanes[0].lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 2, "the commit to be applied")
        wire.lanes[0].block()
        assert waiting.result(DEADLINE).version == 2
        assert outcomes(live) == {"applied": 2, "repeated": 1}
        yield session, session._member.links.lead.connection


def renew(connection: Connection, times: int = 1) -> None:
    """Renews the lease, and waits for the thread that tries to open a lane."""
    for _ in range(times):
        connection.renew()
        if connection._seeker is not None:
            connection._seeker.join(DEADLINE)


def opened_again(live: Live) -> Relay:
    port = lane_port_of(live)
    return Relay(socket.create_server((ELSEWHERE, port)), ("127.0.0.1", port))


@pytest.mark.usefixtures("watchful", "by_hand")
def test_commits_return_to_the_lane_when_its_port_opens_again(live: Live) -> None:
    with fallen_back(live) as (session, connection):
        renew(connection)
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "grpc"}
        relay = opened_again(live)
        renew(connection, 2)
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert (transports(live), session.generation) == ({session.name: "tcp"}, 1)
        assert outcomes(live) == {"applied": 4, "repeated": 1}
        relay.block()
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "grpc"}
        relay = opened_again(live)
        renew(connection)
        session.commit(GRADIENT)
        assert transports(live) == {session.name: "tcp"}, "after commits on a lane, the first renewal tries again"
        relay.refuse()


@pytest.mark.usefixtures("watchful", "by_hand")
def test_between_tries_to_return_the_worker_rests_longer_and_longer(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with fallen_back(live) as (_, connection):
        tried: list[object] = []

        def refused(*arguments: object) -> client_lane.Lane:
            tried.append(arguments)
            raise ConnectionRefusedError

        monkeypatch.setattr("gem_client.transport.connection.open_network_lane", refused)
        counts = []
        for _ in range(200):
            renew(connection)
            counts.append(len(tried))
        assert [counts.index(count) for count in sorted(set(counts))] == [0, 1, 3, 7, 15, 31, 63, 127, 191]


@pytest.mark.usefixtures("by_hand")
def test_a_lane_that_opens_again_and_breaks_at_once_is_not_opened_twice(live: Live) -> None:
    """Else the worker would stand still twice, at each try to return."""
    hellos: list[bytes] = []

    def welcome(visitor: socket.socket) -> None:
        hellos.append(visitor.recv(4096))
        visitor.sendall(opening(Kind.WELCOME, lane_pb2.LaneWelcome()))
        visitor.recv(4096)

    with (
        Wire(live.address) as wire,
        answering(socket.create_server((ELSEWHERE, lane_port_of(live))), welcome),
        connect(wire.address, retry=Patience().retry()) as session,
    ):
        session.join(model())
        session.commit(GRADIENT)
        connection = session._member.links.lead.connection
        for lanes in (3, 4, 4, 5):
            renew(connection)
            session.commit(GRADIENT)
            assert (len(hellos), transports(live)) == (lanes, {session.name: "grpc"})
        assert outcomes(live) == {"applied": 5}


@pytest.mark.usefixtures("watchful", "by_hand")
def test_a_lane_for_a_former_lease_is_not_used(live: Live) -> None:
    with fallen_back(live) as (session, connection):
        relay = opened_again(live)
        renew(connection)
        former = connection._found
        assert former is not None
        expire_all(live)
        session.pull()
        assert session.commit(GRADIENT).version == 3
        assert (former[1]._sock.fileno(), transports(live)) == (-1, {session.name: "tcp"})
        assert relay.accepted == 2, "the former lease's lane, and one for the new lease"
        relay.refuse()


def test_an_idle_lane_on_which_nothing_comes_renews_no_lease(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message might never arrive: `Connection.renew` then takes gRPC."""
    with trained(live, Patience()) as (_, session):
        lane = session._member.links.lead.connection.lane
        assert lane is not None
        for silent, renews in ((0.5, True), (10.0, False), (None, True)):
            monkeypatch.setattr(client_lane, "silent_for", lambda sock, silent=silent: silent)
            assert lane.renew() == renews
