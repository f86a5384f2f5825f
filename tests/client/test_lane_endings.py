"""A session's lane that the server ends while the client sends: the client reads the reason before it gives the lane up."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from gem_api.errors import Draining, LeaseEnded, Overloaded
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_client.transport.lane import Lane
from gem_client.transport.theta_receiver import IN_FLOAT32
from kit.certificates import Authority
from kit.model import in_background
from kit.raw_lane import ERROR, PREFIX, WELCOME, message
from kit.server import DEADLINE

TOKEN = bytes(16)
SIZE = 4_000_000  # parameters: more than any buffer between the two takes


def reason(code: Literal["DRAINING", "LEASE_ENDED", "OVERLOADED"]) -> bytes:
    """The server's last message."""
    error = lane_pb2.LaneError(code=f"ERROR_CODE_{code}", message="why")
    return message(ERROR, error.SerializeToString())


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), DEADLINE)
        server = listener.accept()[0]
    server.settimeout(DEADLINE)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a reset would drop what waits to be sent
    return client, server


def encrypted(client: socket.socket, server: socket.socket, folder: Path) -> tuple[socket.socket, socket.socket]:
    authority = Authority(folder)
    own = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    accepting = in_background(lambda: context.wrap_socket(server, server_side=True))
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    return trusting.wrap_socket(client, server_hostname="127.0.0.1"), accepting.result(DEADLINE)


@pytest.fixture(params=["unix", "tcp", "tls"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's and the server's end of a connection."""
    client, server = socket.socketpair() if request.param == "unix" else tcp_pair()
    if request.param == "tls":
        client, server = encrypted(client, server, tmp_path)
    with client, server:
        yield client, server


def read(server: socket.socket, size: int) -> None:
    """Reads exactly so many bytes."""
    while size:
        data = server.recv(size)
        assert data
        size -= len(data)


def test_a_lane_that_was_ended_before_its_hello_says_why(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    server.sendall(reason("DRAINING"))
    if server.family != socket.AF_UNIX:  # there, a send fails in any case
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    server.close()
    with pytest.raises(Draining):
        Lane(client, TOKEN, DEADLINE)


def test_a_lane_that_is_reset_in_the_middle_of_a_gradient_says_why(ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends

    def serve() -> None:
        read(server, len(message(1, lane_pb2.LaneHello(token=TOKEN).SerializeToString())))
        server.sendall(message(WELCOME, b""))
        read(server, PREFIX)
        server.sendall(reason("LEASE_ENDED"))
        server.close()  # with bytes that are unread

    serving = in_background(serve)
    with pytest.raises(LeaseEnded):
        exchange(client)
    serving.result(DEADLINE)


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)  # TLS says nothing of what comes before all is sent
def test_a_client_that_is_refused_in_the_middle_of_a_gradient_sends_no_more_of_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    client, server = ends
    told = threading.Event()

    def serve() -> int:
        read(server, len(message(1, lane_pb2.LaneHello(token=TOKEN).SerializeToString())))
        server.sendall(message(WELCOME, b""))
        received = len(server.recv(1 << 16))
        server.sendall(reason("OVERLOADED"))
        told.wait(DEADLINE)
        while data := server.recv(1 << 20):
            received += len(data)
        return received

    serving = in_background(serve)
    with pytest.raises(Overloaded):
        exchange(client)
    told.set()
    assert serving.result(DEADLINE) < 4 * SIZE


def exchange(client: socket.socket) -> None:
    """Opens a lane on a connection, and sends a commit."""
    lane = Lane(client, TOKEN, DEADLINE)
    gradient, theta = np.ones(SIZE, np.float32), np.empty(SIZE, np.float32)
    pieces = (gradient[at : at + (1 << 18)].view(np.uint8) for at in range(0, SIZE, 1 << 18))
    try:
        lane.exchange(pb.CommitHeader(lease_id="lease", sequence=1), gradient.nbytes, pieces, theta, IN_FLOAT32)
    finally:
        lane.close()
