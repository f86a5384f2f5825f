"""One long Commit stream: a commit goes up, its result and the new θ come down, with no call set-up in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from queue import SimpleQueue
from typing import Any

from gem_api.errors import ServerUnavailable
from gem_api.framing import Assembly, ChunkView, parse_frame
from gem_api.v1 import training_pb2 as pb

from gem_client.transport.channel import Stub, next_frame


class CommitStream:
    """An open stream. gRPC takes the frames to send from an iterator, in a thread of its own; a commit is queued as a
    whole, so that this thread wakes up once per commit."""

    def __init__(self, stub: Stub) -> None:
        self._outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._address = stub.address
        self._call = stub.Commit(chain.from_iterable(iter(self._outgoing.get, None)))

    def exchange(self, frames: Iterable[bytes], theta: Assembly | None, progress: Callable[[], None]) -> pb.CommitResult:
        """Sends one commit and receives its answer.

        Args:
            frames: Its header and its gradient; the header alone where the gradient lies in shared memory.
            theta: Receives θ; None where the server puts it into shared memory.
            progress: Called for every frame that goes either way.

        Raises:
            GemError: The stream failed and is of no more use.
        """
        self._outgoing.put(noting(progress, frames))
        first = next_frame(self._call, self._address)
        if first is None:
            raise ServerUnavailable("the server ended the stream")
        result, chunk = parse_frame(first, pb.CommitResponse)
        if result is None:
            raise ServerUnavailable("the server sent a chunk where a result was due")
        if theta is not None:
            receive_chunks(chunk, self._call, pb.CommitResponse, theta, progress)
        committed: pb.CommitResult = result
        return committed

    def cancel(self) -> None:
        """Breaks off, from any thread; an exchange in progress raises ServerUnavailable."""
        self._call.cancel()
        self._outgoing.put(None)


def receive_chunks(
    first: ChunkView | None, frames: Iterator[bytes], message_type: Any, into: Assembly, progress: Callable[[], None]
) -> None:
    """Receives the chunk that came with a header, and the stream's others. Raises ServerUnavailable where they end early."""
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
            raise ServerUnavailable("the answer ended before the whole of θ had arrived")


def noting(progress: Callable[[], None], frames: Iterable[bytes]) -> Iterator[bytes]:
    """The frames, `progress` being called as each is taken to be sent."""
    for frame in frames:
        progress()
        yield frame
