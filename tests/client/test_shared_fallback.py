"""If memory can't be shared, tensors go over the lane's port, without an error or a warning."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gem_api.errors import Unauthenticated
from gem_api.lane import Kind, error_message, opening
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_client import connect
from kit.listening import answering
from kit.model import GRADIENT, PLAIN, assert_goes_over_the_network, in_background, model
from kit.process import python
from kit.regions import linux_only
from kit.server import DEADLINE, Live, config, serving

pytestmark = [linux_only, pytest.mark.shared_memory]


@contextmanager
def quietly(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that the user would be shown by default is logged."""
    with caplog.at_level(logging.INFO, "gem_client"):
        yield
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_socket_that_is_not_there_leads_to_the_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As for a worker in a container that lacks the volume."""
    with quietly(caplog), serving(config(memory_socket=str(tmp_path / "s"))) as live, connect(live.address) as session:
        (tmp_path / "s").unlink()
        session.join(model())
        assert_goes_over_the_network(live, session)


def test_a_socket_named_by_a_relative_path_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's folder is not the server's."""
    monkeypatch.chdir(tmp_path)
    with serving(config(memory_socket="s")) as live:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with connect(live.address) as session:
            session.join(model())
            assert session.shares_memory
            session.commit(GRADIENT)
    assert not (tmp_path / "s").exists()


WELCOME = opening(Kind.WELCOME, lane_pb2.LaneWelcome())


def hangs_up(visitor: socket.socket) -> None:
    visitor.recv(4096)


def says(*answer: bytes) -> Callable[[socket.socket], None]:
    """Answers the token with these bytes."""

    def respond(visitor: socket.socket) -> None:
        visitor.recv(4096)
        for part in answer:
            visitor.sendall(part)

    return respond


def hands_over(make: Callable[[], int]) -> Callable[[socket.socket], None]:
    """Welcomes the client with a descriptor."""

    def respond(visitor: socket.socket) -> None:
        visitor.recv(4096)
        descriptor = make()
        socket.send_fds(visitor, [WELCOME], [descriptor])
        os.close(descriptor)

    return respond


def memory_of(size: int) -> int:
    descriptor = os.memfd_create("not-the-servers")
    os.ftruncate(descriptor, size)
    return descriptor


IMPOSTORS: dict[str, Callable[[socket.socket], None]] = {
    "hangs up after the token": hangs_up,
    "sends no message": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "sends a message that is damaged": says(bytes(24)),
    "sends the wrong message": says(opening(Kind.RESULT, pb.CommitResult())),
    "sends no memory": says(WELCOME),
    "refuses": says(opening(Kind.ERROR, error_message(Unauthenticated("no")))),
    "sends a file of another size": hands_over(lambda: memory_of(4096)),
    "sends a device": hands_over(lambda: os.open("/dev/zero", os.O_RDWR)),
    "sends a file that can only be read": hands_over(lambda: os.open("/dev/null", os.O_RDONLY)),
}


@contextmanager
def impostor(path: Path, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Something that is not the server answers at its socket's path."""
    path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    with answering(listener, answer):
        yield


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_what_an_impostor_answers_is_not_trusted_and_the_network_is_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with quietly(caplog), serving(config(PLAIN, memory_socket=str(tmp_path / "s"))) as live, connect(live.address) as session:
        with impostor(tmp_path / "s", IMPOSTORS[kind]):
            session.join(model())
            answer = session.commit(GRADIENT)
            assert (answer.version, answer.lost) == (1, False)
            np.testing.assert_array_equal(answer.theta, [0.75] * 6 + [-0.25] * 3)
        assert_goes_over_the_network(live, session)
        assert live.on_loop(lambda: live.core.outcomes["applied"]) == 4


def test_a_server_that_hands_over_nothing_in_time_is_reached_over_the_network(tmp_path: Path) -> None:
    release = threading.Event()
    with serving(config(memory_socket=str(tmp_path / "s"))) as live, connect(live.address, timeout=0.3) as session:
        with impostor(tmp_path / "s", lambda visitor: release.wait(DEADLINE)):
            in_background(lambda: session.join(model())).result(DEADLINE)
            release.set()
        assert_goes_over_the_network(live, session)


# -- a system that has none of this

ELSEWHERE = """
import socket, sys
sys.modules["fcntl"] = None
for name in ("AF_UNIX", "recv_fds", "send_fds"):
    delattr(socket, name)
import numpy
from gem_client import connect

with connect(sys.argv[1]) as session:
    session.join({"w": numpy.zeros(3)})
    print(session.shares_memory, session.commit(numpy.ones(3)).version)
"""


def test_a_worker_on_a_system_without_unix_sockets_goes_over_the_network(live: Live) -> None:
    """On Windows, say, with the server elsewhere."""
    done = python("-c", ELSEWHERE, live.address)
    assert (done.returncode, done.stdout) == (0, "False 1\n"), done.stderr
