"""Tensor bytes on the wire: a packed buffer cut into `Chunk` frames, framed by hand so that each byte is copied once.

A frame is a protobuf message that holds a header (field 1), a `Chunk` (field 2), or a header and its first chunk; the
four streamed messages share this shape. Python's protobuf would copy a chunk's bytes three times; here they are joined to their
framing in one copy, and read as a view of what arrived. Frames that are legal protobuf but not in the usual form
(unknown fields, another order) take the slow way through protobuf itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from gem_api.errors import IncompleteTransfer, InvalidRequest
from gem_api.layout import Vector

Bytes = bytes | memoryview
CHUNK_BYTES = 1 << 20
_HEADER_IN_FRAME = b"\x0a"  # field 1, length-delimited
_CHUNK_IN_FRAME = b"\x12"  # field 2, length-delimited
_OFFSET = b"\x08"  # field 1 of Chunk, varint
_DATA = b"\x12"  # field 2 of Chunk, length-delimited


class ChunkView(NamedTuple):
    """A received chunk: `offset` in bytes, and a read-only view of its `data`."""

    offset: int
    data: memoryview


class Frame(NamedTuple):
    """A received frame: its header message, its chunk, or both."""

    header: Any | None
    chunk: ChunkView | None


class Packing(NamedTuple):
    """How a buffer's elements lie on the wire: in blocks, of which only the last may be shorter.

    Attributes:
        elements: Elements in a block.
        head: Bytes that open a block.
        item: Bytes of each element after them.
    """

    elements: int
    head: int
    item: int

    @property
    def block(self) -> int:
        """Bytes of a whole block."""
        return self.head + self.elements * self.item

    def nbytes(self, size: int) -> int:
        """Bytes that `size` elements take."""
        return -(-size // self.elements) * self.head + size * self.item

    def size(self, nbytes: int) -> int:
        """Elements in `nbytes` bytes, counted from the buffer's start: the inverse of `nbytes`."""
        blocks, rest = divmod(nbytes, self.block)
        return blocks * self.elements + max(0, rest - self.head) // self.item

    def pieces(self, size: int) -> Iterator[tuple[slice, npt.NDArray[np.uint8]]]:
        """Chunk by chunk: which of `size` elements it carries, and room for their bytes, the same memory each time."""
        step = CHUNK_BYTES // self.block * self.elements
        room = np.empty(self.nbytes(min(step, size)), np.uint8)
        for begin in range(0, size, step):
            end = min(begin + step, size)
            yield slice(begin, end), room[: self.nbytes(end - begin)]


PLAIN = Packing(1, 0, 4)  # float32


def varint(value: int) -> bytes:
    """Protobuf's base-128 encoding of a non-negative integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def chunk_frame(offset: int, data: memoryview, opening: bytes = b"") -> bytes:
    """One frame holding `data` (bytes), which begins at byte `offset` of its buffer. One copy.

    `opening`, a serialised frame that holds a header alone, goes in front: protobuf reads the two as one.
    """
    inner = (_OFFSET + varint(offset) if offset else b"") + _DATA + varint(len(data))
    return b"".join((opening, _CHUNK_IN_FRAME, varint(len(inner) + len(data)), inner, data))


def bytes_of(packed: Vector) -> memoryview:
    """The bytes of a contiguous float32 array, where they lie."""
    return memoryview(packed.reshape(-1)).cast("B")  # type: ignore[arg-type]


def chunk_frames(packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
    """The frames that carry `packed` (float32, shape (P,)), each made when it is asked for; the first with the `opening`."""
    view = bytes_of(packed)
    for offset in range(0, len(view), CHUNK_BYTES):
        yield chunk_frame(offset, view[offset : offset + CHUNK_BYTES], b"" if offset else opening)


def framed(pieces: Iterable[npt.NDArray[np.uint8]], opening: bytes) -> Iterator[bytes]:
    """The frames that carry an encoded buffer, of which `pieces` (uint8, shape (n,)) are the chunks in order; the first with
    the `opening`."""
    offset = 0
    for piece in pieces:
        yield chunk_frame(offset, piece.data, b"" if offset else opening)
        offset += piece.size


def parse_frame(frame: bytes, message_type: type[Message]) -> Frame:
    """Reads a received frame.

    Args:
        frame: The bytes of one message of the stream.
        message_type: The generated class of the stream's messages.

    Raises:
        InvalidRequest: The bytes are no such message, or the message is empty.
    """
    begin = _header_end(frame)
    chunk = _usual_chunk(frame, begin) if begin < len(frame) else None
    if chunk is not None and not begin:
        return Frame(None, chunk)
    try:
        message: Any = message_type.FromString(frame if chunk is None else frame[:begin])
    except DecodeError as error:
        raise InvalidRequest(f"a frame of {len(frame)} bytes is no {message_type.DESCRIPTOR.name}: {error}") from None
    name = message_type.DESCRIPTOR.fields_by_number[1].name
    header = getattr(message, name) if message.HasField(name) else None
    if message.HasField("chunk"):
        chunk = ChunkView(message.chunk.offset, memoryview(message.chunk.data))
    if header is None and chunk is None:
        raise InvalidRequest(f"an empty {message_type.DESCRIPTOR.name}: send a header or a chunk")
    return Frame(header, chunk)


def _header_end(frame: bytes) -> int:
    """Where the header that a frame begins with ends; 0 where it begins with none."""
    if frame[:1] != _HEADER_IN_FRAME:
        return 0
    size, at = _read_varint(frame, 1)
    return at + size if at > 0 else 0


def _usual_chunk(frame: bytes, begin: int) -> ChunkView | None:
    """The chunk from `begin` to the frame's end, in the form that `chunk_frame` and protobuf's serialisers write; else None."""
    if frame[begin : begin + 1] != _CHUNK_IN_FRAME:
        return None
    size, at = _read_varint(frame, begin + 1)
    if at < 0 or at + size != len(frame):
        return None
    offset = 0
    if frame[at : at + 1] == _OFFSET:
        offset, at = _read_varint(frame, at + 1)
    if at < 0 or frame[at : at + 1] != _DATA:
        return None
    size, at = _read_varint(frame, at + 1)
    if at < 0 or at + size != len(frame):
        return None
    return ChunkView(offset, memoryview(frame)[at:])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and the place after it; (0, -1) where it is cut off or longer than 63 bits."""
    value = 0
    for shift in range(0, 63, 7):
        if at >= len(data):
            return 0, -1
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, -1


def copy_in(data: memoryview, into: Vector) -> None:
    """Fills `into` (float32, shape (n,)) with its 4·n bytes."""
    bytes_of(into)[:] = data


class Assembly:
    """A packed buffer being filled from chunks, which must cover it exactly and in order.

    Args:
        into: float32, shape (P,).
        packing: How the elements lie in what is sent.
        unpack: Turns the bytes of whole blocks (a view) into elements: float32, shape (n,), to be filled.
    """

    def __init__(self, into: Vector, packing: Packing = PLAIN, unpack: Callable[[memoryview, Vector], None] = copy_in) -> None:
        self._into = into
        self._packing = packing
        self._unpack = unpack
        self._total = packing.nbytes(into.size)
        self._received = 0

    @property
    def complete(self) -> bool:
        return self._received == self._total

    def add(self, chunk: ChunkView) -> Vector:
        """Unpacks a chunk and returns the elements it filled (a view).

        Raises:
            IncompleteTransfer: The chunk is empty, too large, cuts an element or a block, or is not the one due.
        """
        offset, size, block = chunk.offset, len(chunk.data), self._packing.block
        end = offset + size
        if not 0 < size <= CHUNK_BYTES or (size % block and end != self._total):
            raise IncompleteTransfer(
                f"a chunk of {size} bytes: send 1 to {CHUNK_BYTES} bytes, a multiple of {block} or all that is left"
            )
        if offset != self._received:
            raise IncompleteTransfer(
                f"a chunk at byte {offset} where byte {self._received} was due: send chunks in order, once"
            )
        if end > self._total:
            raise IncompleteTransfer(f"chunks run over the buffer's {self._total} bytes: the chunk at {offset} has {size}")
        filled = self._into[self._packing.size(offset) : self._packing.size(end)]
        self._unpack(chunk.data, filled)
        self._received = end
        return filled

    def add_all(self, data: memoryview) -> None:
        """Unpacks a whole buffer. Raises IncompleteTransfer where it is not of the right size."""
        step = CHUNK_BYTES // self._packing.block * self._packing.block
        for offset in range(0, len(data), step):
            self.add(ChunkView(offset, data[offset : offset + step]))
        self.require_complete()

    def require_complete(self) -> None:
        """Raises IncompleteTransfer where the stream ended too early."""
        if not self.complete:
            raise IncompleteTransfer(f"the stream ended after {self._received} of {self._total} bytes: send the rest")


def empty(size: int) -> Vector:
    """An uninitialised packed buffer: float32, shape (size,)."""
    return np.empty(size, dtype="<f4")
