"""The ways that a commit can go, behind one interface: a test that is written in gRPC's frames runs over each of them.

grpc      the Commit call
tcp       the lane's port: the same headers, and the chunks' data as the payload
memory    the lane's Unix socket: the chunks' data is written to the shared memory, then the header is sent
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import grpc
import pytest
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server.config import ServerConfig

from kit import raw_client
from kit.raw_client import CommitStream, Refusal, Theta, Wire, Worker, received_bytes
from kit.raw_lane import COMMIT, LaneFailed, RawLane, message, offer, tcp, unix
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving, wait_until

IN_MEMORY = pytest.param("memory", marks=linux_only)
WAYS = ["grpc", "tcp", IN_MEMORY]
THROUGH_SOCKETS = ["grpc", "tcp"]  # ways on which a gradient arrives piece by piece
LANES = ["tcp", IN_MEMORY]
all_ways = pytest.mark.parametrize("way", WAYS)
through_sockets = pytest.mark.parametrize("way", THROUGH_SOCKETS)
all_lanes = pytest.mark.parametrize("way", LANES)
FAILED = (grpc.RpcError, LaneFailed)
BYTES_OF_AN_ELEMENT = {tensors_pb2.WIRE_DTYPE_BFLOAT16: 2}


class LaneStream:
    """A lane that takes the frames of a Commit call. It says what they hold in the lane's own words.

    Attributes:
        lane: The lane.
        sent: Bytes sent so far.
    """

    def __init__(self, lane: RawLane, size: int) -> None:
        self.lane = lane
        self.sent = 0
        self._size = size
        self._header = pb.CommitHeader()
        self._written = 0  # bytes of the gradient in the shared memory

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            request = pb.CommitRequest.FromString(frame)
            if request.HasField("header"):
                self._begin(request.header)
            if request.HasField("chunk"):
                self._go_on(request.chunk)

    def _begin(self, header: pb.CommitHeader) -> None:
        if self.lane.gradient is not None:
            self._header, self._written = header, 0
            return
        self._say(message(COMMIT, header.SerializeToString(), self._size * BYTES_OF_AN_ELEMENT.get(header.wire_dtype, 4)))

    def _go_on(self, chunk: tensors_pb2.Chunk) -> None:
        if self.lane.gradient is None:
            self._say(chunk.data)
            return
        self.lane.gradient.view("u1")[chunk.offset : chunk.offset + len(chunk.data)] = memoryview(chunk.data)
        self._written += len(chunk.data)
        if self._written == 4 * self._size:
            self._say(message(COMMIT, self._header.SerializeToString()))

    def _say(self, data: bytes) -> None:
        self.sent += len(data)
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has ended the lane: its last message says why
            self.lane.send(data)

    def half_close(self) -> None:
        """A lane has no half: what was sent is known to be complete."""

    def cancel(self) -> None:
        self.lane.close()

    def answer(self, size: int) -> tuple[pb.CommitResult, Theta]:
        result, theta = self.lane.answer()
        assert theta.size == size
        return result, theta

    def refusal(self) -> Refusal:
        return self.lane.refusal()

    def ended_well(self) -> bool:
        """Whether the server closes the connection once the client does, and sends nothing more."""
        self.lane.hang_up()
        return self.lane.closed()


def opened(worker: Worker, way: str) -> LaneStream:
    """The worker's lane."""
    offered = offer(worker)
    lane = unix(offered.socket) if way == "memory" else tcp(offered.port)
    try:
        if way == "memory":
            lane.hello_in_memory(offered.token, worker.size)
        else:
            lane.hello(offered.token)
    except BaseException:
        lane.close()
        raise
    return LaneStream(lane, worker.size)


@contextmanager
def wired(live: Live, way: str = "grpc", **keywords: Any) -> Iterator[Wire]:
    """Runs a client during a `with` block; its workers' commits go this way."""
    with raw_client.wired(live, **keywords) as wire, ExitStack() as lanes:
        if way != "grpc":
            wire.open_commits = partial(_open, way, lanes)
        yield wire


def _open(way: str, lanes: ExitStack, worker: Worker) -> CommitStream:
    stream = opened(worker, way)
    lanes.callback(stream.cancel)
    return stream


def configured(way: str, *arguments: Any, **changes: Any) -> ServerConfig:
    """A server's configuration for tests, with what the way needs."""
    return config(*arguments, memory_socket=abstract() if way == "memory" else "", **changes)


@contextmanager
def running(way: str, *arguments: Any, **changes: Any) -> Iterator[tuple[Live, Wire]]:
    """A server with this configuration, and a client whose workers' commits go this way."""
    with serving(configured(way, *arguments, **changes)) as live, wired(live, way) as wire:
        yield live, wire


def read_by_the_server(live: Live, worker: Worker, *frames: bytes) -> CommitStream:
    """Opens what carries the worker's commits, sends the frames, and waits until the server has read them."""
    stream = worker.stream()
    before = received_bytes(live)
    stream.send(*frames)
    wait_until(lambda: received_bytes(live) == before + stream.sent, "the server to read what was sent")
    return stream


def refusal_of(error: BaseException) -> Refusal:
    """What the server said when a commit failed with one of `FAILED`."""
    return error.refusal if isinstance(error, LaneFailed) else Refusal.of(error)
