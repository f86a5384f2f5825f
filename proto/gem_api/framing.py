"""Writes and reads tensor frames: a packed buffer cut into `Chunk` messages, serialised by hand so each byte is copied once.

A frame is a protobuf message that holds a header (field 1), a `Chunk` (field 2), or a header and its first chunk. The four
streamed messages share this structure. Python's protobuf would copy a chunk's bytes three times. This module writes them with
one copy, and reads them as a view of the received bytes. Other legal encodings of a frame (unknown fields, another order of
fields) are left to protobuf itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from gem_api.errors import IncompleteTransfer, InvalidRequest
from gem_api.layout import Vector

Bytes = bytes | memoryview
CHUNK_BYTES = 1 << 20
_UPLOADS = 4  # for gradients that arrive, that are nearly there, that wait to be applied, and that are being applied
_UPLOAD_BYTES = 64 << 20  # up to which small models have a buffer for each worker
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
    """The arrangement of a buffer's elements on the wire: in blocks, of which only the last may be shorter.

    Attributes:
        elements: Elements in a block.
        head: Bytes at the start of a block, before its elements.
        item: Bytes of each element.
    """

    elements: int
    head: int
    item: int

    @property
    def block(self) -> int:
        """Bytes of a full block."""
        return self.head + self.elements * self.item

    def nbytes(self, size: int) -> int:
        """Bytes that `size` elements take."""
        return -(-size // self.elements) * self.head + size * self.item

    def size(self, nbytes: int) -> int:
        """Elements in `nbytes` bytes, counted from the buffer's start: the inverse of `nbytes`."""
        blocks, rest = divmod(nbytes, self.block)
        return blocks * self.elements + max(0, rest - self.head) // self.item

    def pieces(self, size: int) -> Iterator[tuple[slice, npt.NDArray[np.uint8]]]:
        """For each chunk: the slice of the `size` elements in it, and a buffer for its bytes, which the next chunk reuses."""
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
    """A frame with a chunk of `data` (bytes), which begins at byte `offset` of its buffer. Copies the data once.

    `opening` is a serialised frame with only a header. It goes in front: protobuf reads the two as one message.
    """
    inner = (_OFFSET + varint(offset) if offset else b"") + _DATA + varint(len(data))
    return b"".join((opening, _CHUNK_IN_FRAME, varint(len(inner) + len(data)), inner, data))


def upload_buffers(workers: int, nbytes: int) -> int:
    """The number of buffers of `nbytes` that a server has for its workers' gradients, besides those that arrive slowly."""
    return min(workers, max(_UPLOADS, _UPLOAD_BYTES // max(1, nbytes)))


def bytes_of(packed: Vector) -> memoryview:
    """A view of a contiguous float32 array as bytes."""
    return memoryview(packed.reshape(-1)).cast("B")  # type: ignore[arg-type]


def chunks(packed: Vector) -> Iterator[npt.NDArray[np.uint8]]:
    """Generates views of the bytes of `packed` (float32, shape (P,)), CHUNK_BYTES at a time."""
    view = packed.reshape(-1).view(np.uint8)
    for offset in range(0, view.size, CHUNK_BYTES):
        yield view[offset : offset + CHUNK_BYTES]


def framed(pieces: Iterable[npt.NDArray[np.uint8]], opening: bytes) -> Iterator[bytes]:
    """Generates the frames of an encoded buffer from its chunks, `pieces` (uint8, shape (n,)); the first has the `opening`."""
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
        InvalidRequest: The bytes are not such a message, or the message is empty.
    """
    begin = _header_end(frame)
    chunk = _plain_chunk(frame, begin) if begin < len(frame) else None
    if chunk is not None and not begin:
        return Frame(None, chunk)
    try:
        message: Any = message_type.FromString(frame if chunk is None else frame[:begin])
    except DecodeError as error:
        raise InvalidRequest(f"a frame of {len(frame)} bytes is not a valid {message_type.DESCRIPTOR.name}: {error}") from None
    name = message_type.DESCRIPTOR.fields_by_number[1].name
    header = getattr(message, name) if message.HasField(name) else None
    if message.HasField("chunk"):
        chunk = ChunkView(message.chunk.offset, memoryview(message.chunk.data))
    if header is None and chunk is None:
        raise InvalidRequest(f"the {message_type.DESCRIPTOR.name} is empty: send a header or a chunk")
    return Frame(header, chunk)


def _header_end(frame: bytes) -> int:
    """The end of the header at the start of a frame; 0 if the frame does not begin with one."""
    if frame[:1] != _HEADER_IN_FRAME:
        return 0
    size, at = _read_varint(frame, 1)
    return at + size if at > 0 else 0


def _plain_chunk(frame: bytes, begin: int) -> ChunkView | None:
    """The chunk from `begin` to the frame's end; None if it is not encoded as `chunk_frame` and protobuf's serialisers do."""
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
    """The varint at `at` and the offset after it; (0, -1) if it is cut off or longer than 63 bits."""
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
    """Copies 4·n bytes into `into` (float32, shape (n,))."""
    bytes_of(into)[:] = data


class Assembly:
    """Fills a packed buffer from chunks, which must cover it exactly and in order.

    Args:
        into: float32, shape (P,).
        packing: The arrangement of the elements in the chunks.
        unpack: Decodes the bytes of whole blocks (a view) into an array of elements: float32, shape (n,).
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
        """Decodes a chunk and returns a view of the elements that it filled.

        Raises:
            IncompleteTransfer: The chunk is empty, too large, out of order, or splits an element or a block.
        """
        offset, size, block = chunk.offset, len(chunk.data), self._packing.block
        end = offset + size
        if not 0 < size <= CHUNK_BYTES or (size % block and end != self._total):
            raise IncompleteTransfer(
                f"the chunk has {size} bytes: send 1 to {CHUNK_BYTES}, a multiple of {block} or the rest of the buffer"
            )
        if offset != self._received:
            raise IncompleteTransfer(
                f"the chunk begins at byte {offset}, but byte {self._received} was expected: send each chunk once, in order"
            )
        if end > self._total:
            raise IncompleteTransfer(
                f"the chunk at byte {offset} has {size} bytes: it exceeds the buffer's {self._total} bytes"
            )
        filled = self._into[self._packing.size(offset) : self._packing.size(end)]
        self._unpack(chunk.data, filled)
        self._received = end
        return filled

    def add_all(self, data: memoryview) -> None:
        """Decodes a whole buffer. Raises IncompleteTransfer if its size is wrong."""
        step = CHUNK_BYTES // self._packing.block * self._packing.block
        for offset in range(0, len(data), step):
            self.add(ChunkView(offset, data[offset : offset + step]))
        self.require_complete()

    def require_complete(self) -> None:
        """Raises IncompleteTransfer if bytes are missing."""
        if not self.complete:
            raise IncompleteTransfer(f"the stream ended after {self._received} of {self._total} bytes: send the rest")


def empty(size: int) -> Vector:
    """An uninitialised packed buffer: float32, shape (size,)."""
    return np.empty(size, dtype="<f4")


def empty_pages(size: int) -> Vector:
    """As `empty`, on pages of memory that hold nothing else, and that stay where they are in a process that forks, so that a
    GPU may lock them."""
    return np.frombuffer(mmap.mmap(-1, max(1, 4 * size)), "<f4", size)
