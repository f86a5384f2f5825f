"""The floors, which no contender can be faster than: the arithmetic without a transfer, and transfers without arithmetic."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import chain, cycle
from multiprocessing.synchronize import Event
from queue import SimpleQueue
from typing import Any, ClassVar

import grpc
import numpy as np
from gem_api.framing import CHUNK_BYTES, bytes_of
from gem_api.layout import Layout
from gem_api.process.allocator import tune_allocator
from gem_api.wire import FLOAT32
from gem_server.rules import base
from gem_server.rules.gem import Gem

from benchmarks.lib.load import RoundTrip
from benchmarks.peers.contenders.base import HOST, START_SECONDS, Contender, OwnProcess, Place, gradient
from benchmarks.peers.contenders.encryption import encrypted, make_certificate

_PATH = "/benchmark.Echo/Echo"
_HEADER = bytes(120)  # about the size of a commit's header, and of its result; the first frame begins with it


class FusedPass(Contender):
    """The rule alone, in one process: alternating commits of W workers, applied as in the server's apply thread."""

    kind: ClassVar[str] = "floor"

    def processes(self, workers: int) -> int:
        return 1

    @contextmanager
    def server(self, place: Place) -> Iterator[list[int]]:
        yield []

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        rule, layout = Gem(), Layout.of({"theta": (place.parameters,)})
        theta = np.zeros(place.parameters, np.float32)
        states = [{name: np.zeros(place.parameters, np.float32) for name in rule.buffers} for _ in range(place.workers)]
        gradients = [gradient(place, worker) for worker in range(place.workers)]
        commits = cycle(zip(gradients, states, strict=True))

        def round_trip() -> Any:
            mine, buffers = next(commits)
            rule.apply(layout, theta, mine, buffers, base.RuleInput(place.workers - 1))
            return theta

        yield round_trip


class GrpcEcho(OwnProcess):
    """Echoes a gradient, in the frames of a commit, on one long stream. The server receives all frames and sends them back
    without decoding them."""

    kind: ClassVar[str] = "floor"

    def serve(self, place: Place, ready: Event) -> None:
        tune_allocator()
        asyncio.run(_serve_echo(place, ready))

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        tune_allocator()
        frames = [*FLOAT32.frames(gradient(place, index), _HEADER)]
        outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        with grpc.insecure_channel(place.address, [("grpc.enable_http_proxy", 0)]) as channel:
            grpc.channel_ready_future(channel).result(START_SECONDS)
            call = channel.stream_stream(_PATH)(chain.from_iterable(iter(outgoing.get, None)))

            def round_trip() -> Any:
                outgoing.put(iter(frames))
                return [next(call) for _ in frames]

            yield round_trip
            outgoing.put(None)


async def _serve_echo(place: Place, ready: Event) -> None:
    chunks = -(-4 * place.parameters // CHUNK_BYTES)

    async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
        while (first := await context.read()) is not grpc.aio.EOF:
            for frame in [first, *[await context.read() for _ in range(chunks - 1)]]:
                await context.write(frame)

    server = grpc.aio.server()
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("benchmark.Echo", handlers)])
    server.add_insecure_port(place.address)
    await server.start()
    ready.set()
    await server.wait_for_termination()


class SocketEcho(OwnProcess):
    """A socket, plain or TLS, and one thread for each worker: P floats are received into one buffer and sent back from it."""

    kind: ClassVar[str] = "floor"

    def serve(self, place: Place, ready: Event) -> None:
        if self.transport == "tls":
            make_certificate(place)
        with socket.create_server((HOST, place.port), backlog=place.workers) as listener:
            ready.set()
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._echo, args=(connection, place), daemon=True).start()

    @contextmanager
    def worker(self, place: Place, index: int) -> Iterator[RoundTrip]:
        outgoing, theta = gradient(place, index), np.empty(place.parameters, np.float32)
        with self._tuned(socket.create_connection((HOST, place.port)), place, server_side=False) as connection:

            def round_trip() -> Any:
                connection.sendall(bytes_of(outgoing))
                receive(connection, bytes_of(theta))
                return theta

            yield round_trip

    def _echo(self, accepted: socket.socket, place: Place) -> None:
        connection = self._tuned(accepted, place, server_side=True)
        buffer = memoryview(bytearray(4 * place.parameters))
        while receive(connection, buffer):
            connection.sendall(buffer)

    def _tuned(self, sock: socket.socket, place: Place, server_side: bool) -> socket.socket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return encrypted(sock, place, server_side) if self.transport == "tls" else sock


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`. Returns False if the connection ends before that."""
    received = 0
    while received < len(into):
        size = connection.recv_into(into[received:])
        if not size:
            return False
        received += size
    return True


FLOORS = (
    FusedPass("fused-pass", "floor: fused pass alone", transport="-"),
    GrpcEcho("grpc-echo", "floor: bare gRPC echo", "none"),
    SocketEcho("tcp-echo", "floor: raw TCP echo", "none"),
    SocketEcho("tls-echo", "floor: raw TLS echo", "none", "tls"),
)
