"""One long Commit stream: a commit goes up, its result and the new θ come down, with no call set-up in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from queue import SimpleQueue
from typing import Any

from gem_api.errors import ServerUnavailable
from gem_api.framing import Assembly, ChunkView, parse_frame
from gem_api.v1 import training_pb2 as pb

from gem_client.channel import Stub, next_frame


class CommitStream:
    """An open stream. gRPC takes the frames to send from an iterator, in a thread of its own; a commit is queued as a
    whole, so that this thread wakes up once per commit."""

    def __init__(self, stub: Stub) -> None:
        self._outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._call = stub.Commit(chain.from_iterable(iter(self._outgoing.get, None)))

    def exchange(
        self, header: pb.CommitHeader, gradient: Iterable[bytes], theta: Assembly | None, progress: Callable[[], None]
    ) -> pb.CommitResult:
        """Sends one commit and receives its answer.

        Args:
            header: Who, which, computed on what.
            gradient: The frames of its gradient; none where it lies in shared memory.
            theta: Receives θ; None where the server puts it into shared memory.
            progress: Called for every frame that goes either way.

        Raises:
            GemError: The stream failed and is of no more use.
        """
        opening = pb.CommitRequest(header=header).SerializeToString()
        self._outgoing.put(noting(progress, chain([opening], gradient)))
        result = self._read()
        if not isinstance(result, pb.CommitResult):
            raise ServerUnavailable("the server sent a chunk where a result was due")
        if theta is not None:
            receive_chunks(self._call, pb.CommitResponse, theta, progress)
        return result

    def cancel(self) -> None:
        """Breaks off, from any thread; an exchange in progress raises ServerUnavailable."""
        self._call.cancel()
        self._outgoing.put(None)

    def _read(self) -> Any:
        frame = next_frame(self._call)
        if frame is None:
            raise ServerUnavailable("the server ended the stream")
        return parse_frame(frame, pb.CommitResponse)


def receive_chunks(frames: Iterator[bytes], message_type: Any, into: Assembly, progress: Callable[[], None]) -> None:
    """Receives a stream's chunks. Raises ServerUnavailable where they end early."""
    while not into.complete:
        frame = next_frame(frames)
        chunk = parse_frame(frame, message_type) if frame is not None else None
        if not isinstance(chunk, ChunkView):
            raise ServerUnavailable("the answer ended before the whole of θ had arrived")
        into.add(chunk)
        progress()


def noting(progress: Callable[[], None], frames: Iterator[bytes]) -> Iterator[bytes]:
    """The frames, `progress` being called as each is taken to be sent."""
    for frame in frames:
        progress()
        yield frame
