"""One long Commit stream: it sends commits and receives their results and the new θ, without a call set-up for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from queue import SimpleQueue
from typing import Any

from gem_api.errors import ServerUnavailable
from gem_api.framing import Assembly, ChunkView, parse_frame
from gem_api.layout import Vector
from gem_api.v1 import training_pb2 as pb

from gem_client.transport.channel import Stub, next_frame
from gem_client.transport.theta_receiver import ThetaReceiver


class CommitStream:
    """An open stream. gRPC reads the frames to send from an iterator, in a thread of its own. A commit is queued as a whole, so
    that this thread wakes up once per commit."""

    def __init__(self, stub: Stub) -> None:
        self._outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._address = stub.address
        self._call = stub.Commit(chain.from_iterable(iter(self._outgoing.get, None)))

    def exchange(
        self,
        frames: Iterable[bytes],
        theta: Vector,
        receiver: ThetaReceiver,
        progress: Callable[[], None],
    ) -> pb.CommitResult:
        """Sends one commit in frames and receives its result, and θ into `theta` (float32, shape (P,)). Calls `progress` for
        every frame sent or received. Raises GemError if the stream failed and can't be used again."""
        self._outgoing.put(noting(progress, frames))
        first = next_frame(self._call, self._address)
        if first is None:
            raise ServerUnavailable("the server ended the stream")
        result, chunk = parse_frame(first, pb.CommitResponse)
        if result is None:
            raise ServerUnavailable("the server sent a chunk instead of a result")
        receive_chunks(chunk, self._call, pb.CommitResponse, receiver.form(result).assembly(theta), progress)
        committed: pb.CommitResult = result
        return committed

    def cancel(self) -> None:
        """Cancels the stream, from any thread; an exchange in progress raises ServerUnavailable."""
        self._call.cancel()
        self._outgoing.put(None)


def receive_chunks(
    first: ChunkView | None, frames: Iterator[bytes], message_type: Any, into: Assembly, progress: Callable[[], None]
) -> None:
    """Receives θ: the chunk that came with the header, and those that follow. Raises ServerUnavailable if any is missing."""
    chunk = first
    while True:
        if chunk is not None:
            into.add(chunk)
            progress()
        if into.complete:
            return
        frame = next_frame(frames)
        header, chunk = parse_frame(frame, message_type) if frame is not None else (None, None)
        if chunk is None or header is not None:
            raise ServerUnavailable("the response ended before the whole of θ was received")


def noting(progress: Callable[[], None], frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the frames, and calls `progress` for each."""
    for frame in frames:
        progress()
        yield frame
