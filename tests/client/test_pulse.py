"""What tells a lane that waits from a dead one: the packets that come, and whether its port lets connections be made."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

import pytest
from gem_api import lane
from gem_client.transport import pulse
from gem_client.transport.lane import CONNECT_SECONDS
from gem_client.transport.pulse import LOOK_SECONDS, SILENT_SECONDS, TRY_SECONDS, Pulse, silent_for
from kit.failing import failing
from kit.regions import linux_only
from kit.server import DEADLINE, wait_until

PATIENCE = 60.0


class Watched:
    """A pulse on a connection to a port of this machine, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stuck = False  # whether no byte has moved since the last look
        self.port = socket.create_server(("127.0.0.1", 0))
        self.sock = socket.create_connection(self.port.getsockname(), DEADLINE)
        self.peer, _ = self.port.accept()
        self.pulse = Pulse(self.sock, PATIENCE, lambda: self.now)

    def look_for(self, seconds: float) -> int:
        """Looks every LOOK_SECONDS; returns how often the port was tried meanwhile."""
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.now += LOOK_SECONDS
            self.pulse.look(self.stuck)
            self.stuck = True
        tried = 0
        self.port.setblocking(False)
        while True:
            try:
                self.port.accept()[0].close()
            except BlockingIOError:
                return tried
            tried += 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """On a system that doesn't say when packets came."""
    monkeypatch.setattr(pulse, "silent_for", lambda sock: None)
    made = Watched()
    with made.port, made.sock, made.peer:
        yield made


def test_a_lane_whose_port_can_be_reached_may_wait(watched: Watched) -> None:
    assert 5 <= watched.look_for(15.0) <= 8, "the port is tried every two seconds, not at every look"


def test_a_lane_whose_port_is_gone_is_dead_within_seconds(watched: Watched) -> None:
    watched.port.close()
    began = watched.now
    with pytest.raises(OSError, match="does not answer any more"):
        watched.look_for(10.0)
    assert watched.now - began == pytest.approx(SILENT_SECONDS)


def test_a_process_without_descriptors_can_not_tell_that_a_port_is_gone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", failing(errno.EMFILE))
    watched.look_for(15.0)


def test_as_long_as_packets_come_the_port_is_not_tried(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "silent_for", lambda sock: 1.1)
    assert watched.look_for(15.0) == 0


def test_bytes_that_move_are_packets_too(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may say when the last packet came, and that may be longer ago than the exchange."""
    monkeypatch.setattr(pulse, "silent_for", lambda sock: 100.0)
    for _ in range(5):
        assert watched.look_for(1.5) == 0
        watched.stuck = False


def test_a_packet_that_comes_while_the_port_is_tried_saves_the_lane(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.port.close()
    ages = [0.0, 3.0, 0.1]
    monkeypatch.setattr(pulse, "silent_for", lambda sock: ages.pop(0))
    watched.pulse.look(again=False)
    watched.now += SILENT_SECONDS
    watched.pulse.look(again=True)
    assert ages == []


def test_patience_ends_even_if_packets_come(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "silent_for", lambda sock: 0.0)
    watched.look_for(PATIENCE - 1)
    with pytest.raises(TimeoutError):
        watched.look_for(1)


@linux_only
def test_the_system_says_when_the_last_packet_came() -> None:
    watched = Watched()
    with watched.port, watched.sock, watched.peer:
        wait_until(lambda: (silent_for(watched.sock) or 0.0) >= 0.1, "a tenth of a second without a packet")
        began = time.monotonic()
        watched.peer.sendall(b"x")
        assert watched.sock.recv(1) == b"x"
        silent = silent_for(watched.sock)
        assert silent is not None
        assert silent <= time.monotonic() - began + 0.02


def test_a_unix_socket_has_no_pulse() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert silent_for(one) is None


def test_the_limits_fit_each_other() -> None:
    """A worker stands still for at most 8 seconds: until the lane is dead, and until another can't be opened. A packet that is
    lost is repeated in time: that of the keep-alive, and the first one of a connection, which the system repeats after a
    second."""
    assert 2 * LOOK_SECONDS + SILENT_SECONDS + TRY_SECONDS <= 4.5
    assert CONNECT_SECONDS <= 3.0
    assert lane._KEEPALIVE["TCP_KEEPIDLE"] + LOOK_SECONDS < SILENT_SECONDS
    assert TRY_SECONDS > 1.0
