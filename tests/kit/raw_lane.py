"""A raw client of the lane for tests: sends anything, valid or not, and shows exactly what came back.

It is written from docs/lane.md with `socket` and `struct` alone; it shares nothing with the SDK or the server.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from gem_api.v1 import errors_pb2, lane_pb2
from gem_api.v1 import training_pb2 as pb

from kit.raw_client import Refusal, Theta, Worker
from kit.server import DEADLINE

HELLO, WELCOME, COMMIT, RESULT, ERROR, RENEW = 1, 2, 3, 4, 5, 6
PREFIX = 24
PAGE = 4096


class LaneFailed(Exception):
    """The server ended the lane; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.details)
        self.refusal = refusal


def hello(token: bytes) -> bytes:
    """The message that opens a lane."""
    return message(HELLO, lane_pb2.LaneHello(token=token).SerializeToString())


def message(kind: int, header: bytes, payload: int = 0, *, magic: bytes = b"GEML", version: int = 1) -> bytes:
    """A message without its payload."""
    fields = struct.pack("<4sBBHIQ", magic, version, kind, 0, len(header), payload)
    return fields + struct.pack("<I", zlib.crc32(fields)) + header


class RawLane:
    """An open socket to the server's lane.

    Attributes:
        sock: The socket.
        gradient, theta: The shared memory of a Unix socket: float32, shape (P,); None on TCP.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(DEADLINE)
        self.memory: mmap.mmap | None = None
        self.gradient: npt.NDArray[np.float32] | None = None
        self.theta: npt.NDArray[np.float32] | None = None

    def send(self, *data: bytes) -> None:
        for part in filter(None, data):
            self.sock.sendall(part)

    def exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises EOFError if the server closes the connection before."""
        data = bytearray()
        while len(data) < size:
            try:
                more = self.sock.recv(size - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                raise EOFError(f"the server closed the connection after {len(data)} of {size} bytes")
            data += more
        return bytes(data)

    def receive(self, start: bytes = b"") -> tuple[int, bytes, bytes]:
        """The next message, which begins with `start`: its kind, header and payload. Raises LaneFailed if it says that the lane
        has failed."""
        start += self.exactly(PREFIX - len(start))
        magic, version, kind, reserved, header_bytes, payload_bytes, checksum = struct.unpack("<4sBBHIQI", start)
        assert (magic, version, reserved, checksum) == (b"GEML", 1, 0, zlib.crc32(start[:20]))
        header, payload = self.exactly(header_bytes), self.exactly(payload_bytes)
        if kind == ERROR:
            error = lane_pb2.LaneError.FromString(header)
            name = errors_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_")
            raise LaneFailed(Refusal(None, name, error.lease_end_reason, error.message))
        return kind, header, payload

    def hello(self, token: bytes) -> None:
        """Opens the lane on TCP."""
        self.send(hello(token))
        kind, _, payload = self.receive()
        assert (kind, payload) == (WELCOME, b"")

    def hello_in_memory(self, token: bytes, parameters: int) -> None:
        """Opens the lane on a Unix socket, and maps the memory that comes with the welcome."""
        self.send(hello(token))
        descriptor = self.welcomed()
        pages = -(-4 * parameters // PAGE) * PAGE
        self.memory = mmap.mmap(descriptor, PAGE + 2 * pages)
        os.close(descriptor)
        self.gradient = np.frombuffer(self.memory, "<f4", parameters, PAGE)
        self.theta = np.frombuffer(self.memory, "<f4", parameters, PAGE + pages)

    def welcomed(self) -> int:
        """The descriptor of the memory that comes with the server's welcome. Raises LaneFailed if it refuses the lane."""
        start, descriptors, _, _ = socket.recv_fds(self.sock, PREFIX, 2)
        if not descriptors:
            self.receive(start)
            raise AssertionError("the server's welcome brought no memory")
        assert struct.unpack("<4sBBHIQI", start)[:6] == (b"GEML", 1, WELCOME, 0, 0, 0)
        (descriptor,) = descriptors
        return descriptor

    def commit(self, header: pb.CommitHeader, payload: bytes = b"", declared: int | None = None) -> None:
        """Sends a commit; `declared` is the payload's size in the prefix, if not the true one."""
        size = len(payload) if declared is None else declared
        self.send(message(COMMIT, header.SerializeToString(), size), payload)

    def answer(self) -> tuple[pb.CommitResult, Theta]:
        """The result of a commit, and the θ in its payload, or in the shared memory."""
        kind, header, payload = self.receive()
        assert kind == RESULT
        theta = np.frombuffer(payload, "<f4") if self.theta is None else self.theta.copy()
        return pb.CommitResult.FromString(header), theta

    def refusal(self) -> Refusal:
        """Reads until the server says why it ends the lane; it then closes the connection."""
        try:
            while True:
                self.receive()
        except LaneFailed as failed:
            assert self.closed()
            return failed.refusal

    def closed(self) -> bool:
        """Whether the server has closed the connection, and sent nothing more."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def hang_up(self) -> None:
        """Says that nothing more comes; what the server sends can still be read."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.gradient = self.theta = self.memory = None
        self.sock.close()

    def __enter__(self) -> RawLane:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def offer(worker: Worker) -> pb.OpenLaneResponse:
    """Where the server lets this worker open a lane, with a new token."""
    return worker.wire.call("OpenLane", pb.OpenLaneRequest(lease_id=worker.lease_id))  # type: ignore[no-any-return]


def tcp(port: int, context: ssl.SSLContext | None = None, source: str = "127.0.0.1") -> RawLane:
    """A connection to the lane's port on this machine, from an address."""
    sock = socket.create_connection(("127.0.0.1", port), DEADLINE, (source, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return RawLane(context.wrap_socket(sock, server_hostname="127.0.0.1") if context is not None else sock)


def unix(path: str) -> RawLane:
    """A connection to the lane's Unix socket."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + path[1:] if path.startswith("@") else path)
    return RawLane(sock)


def opened(worker: Worker, context: ssl.SSLContext | None = None) -> RawLane:
    """The worker's lane over TCP."""
    offered = offer(worker)
    lane = tcp(offered.port, context)
    lane.hello(offered.token)
    return lane


def opened_in_memory(worker: Worker) -> RawLane:
    """The worker's lane with shared memory."""
    offered = offer(worker)
    lane = unix(offered.socket)
    lane.hello_in_memory(offered.token, worker.size)
    return lane


def header(worker: Worker, **changes: Any) -> pb.CommitHeader:
    """The header of the worker's next commit, with some fields changed."""
    return pb.CommitRequest.FromString(worker.header(**changes)).header


def committed(worker: Worker, lane: RawLane, value: float = 1.0, **changes: Any) -> tuple[pb.CommitResult, Theta]:
    """One commit of a gradient whose elements are all `value`."""
    if lane.gradient is not None:
        lane.gradient[:] = value
        lane.commit(header(worker, **changes))
    else:
        lane.commit(header(worker, **changes), worker.gradient(value).tobytes())
    return worker.took(lane.answer())
