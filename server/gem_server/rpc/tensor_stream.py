"""Reads and writes the tensor frames of one streamed call, and counts their bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from gem_api.errors import DeadlineExceeded, IncompleteTransfer
from gem_api.framing import CHUNK_BYTES, ChunkView, Frame, parse_frame
from gem_api.layout import Vector
from gem_api.methods import MAX_REQUEST_BYTES
from gem_api.wire import Format, ThetaFormat

from gem_server.core.central_variable import Check
from gem_server.intake.calls import Call
from gem_server.rpc.handlers import Context, require_short
from gem_server.telemetry.progress import Traffic

FRAME_SECONDS = 2.0  # in which a client without a lease must read a frame, on average


class Transfer:
    """One call's frames.

    Args:
        call: The call; its headers must name its own leases.
        context: gRPC's side of it.
        message_type: The generated class of the frames that come in.
        traffic: Where bytes are counted.
    """

    def __init__(self, call: Call, context: Context, message_type: Any, traffic: Traffic) -> None:
        self._call = call
        self._context = context
        self._message_type = message_type
        self._meter = traffic.grpc
        self._ahead: ChunkView | None = None  # the chunk that came in the same frame as the last header

    async def read_header(self) -> Any | None:
        """The next header; None at the end of the stream.

        Raises:
            IncompleteTransfer: A chunk comes instead.
            PermissionDenied: It names a lease of another client.
        """
        frame = Frame(None, self._ahead) if self._ahead is not None else await self._read()
        if frame is None:
            return None
        if frame.header is None:
            raise IncompleteTransfer("expected a header, got a chunk: send the header first")
        self._call.require_own(frame.header.lease_id)
        self._ahead = frame.chunk
        return frame.header

    async def _read_chunk(self) -> ChunkView | None:
        """The next chunk; None at the end of the stream."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        frame = await self._read()
        if frame is not None and frame.header is not None:
            raise IncompleteTransfer("expected a chunk, got a header: finish one transfer before the next")
        return frame.chunk if frame is not None else None

    async def _read(self) -> Frame | None:
        frame = await self._context.read()
        if frame is grpc.aio.EOF:
            return None
        self._meter.received += len(frame)
        require_short("a frame", len(frame), CHUNK_BYTES + MAX_REQUEST_BYTES)
        return parse_frame(frame, self._message_type)

    async def require_end(self) -> None:
        """Raises IncompleteTransfer unless the stream ends here."""
        if self._ahead is not None or await self._read() is not None:
            raise IncompleteTransfer("got a frame after the last chunk: end the stream after it")

    async def receive(self, format_: Format, into: Vector, check: Check, kept: list[memoryview] | None = None) -> None:
        """Fills `into` (float32, shape (P,)) from chunks. Checks each while it is in the cache, and appends its bytes to
        `kept`, if given."""
        assembly = format_.assembly(into)
        while not assembly.complete:
            chunk = await self._read_chunk()
            if chunk is None:
                assembly.require_complete()
                return
            check(assembly.add(chunk))
            if kept is not None:
                kept.append(chunk.data)

    async def skip(self, nbytes: int) -> None:
        """Reads and drops the chunks of a repeated gradient of `nbytes` bytes."""
        received = 0
        while received < nbytes:
            chunk = await self._read_chunk()
            if chunk is None or chunk.offset != received or not 0 < len(chunk.data) <= nbytes - received:
                raise IncompleteTransfer("the repeated commit's chunks do not cover its gradient: a repeat is sent whole")
            received += len(chunk.data)

    async def write(self, frame: bytes) -> None:
        self._meter.sent += len(frame)
        await self._context.write(frame)

    async def send_theta(self, opening: bytes, packed: Vector, format_: ThetaFormat, patience: float | None = None) -> None:
        """Streams a header and θ (float32, shape (P,)) without a copy: θ must not change before this call returns.

        Raises DeadlineExceeded if the client takes longer than `patience` seconds, and `FRAME_SECONDS` for each frame, to read
        it: a client without a lease could otherwise keep its copy of θ in memory for ever, and other readers out.
        """
        deadline = None if patience is None else asyncio.get_running_loop().time() + patience
        for frame in format_.frames(packed, opening):
            try:
                async with asyncio.timeout_at(deadline):
                    await self.write(frame)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"θ was read too slowly: {patience:.0f} s are allowed, and {FRAME_SECONDS:.0f} s for each MiB"
                ) from None
            if deadline is not None:
                deadline += FRAME_SECONDS
