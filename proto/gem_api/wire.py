"""Wire formats: the number formats of gradients and θ on the network.

float32    4 bytes an element, without conversion or loss
bfloat16   2 bytes an element, float32's range, 8 significant bits
int8       about 1 byte an element: blocks with a scale each. Gradients with error feedback; θ as a difference: `worker_theta`

`v1/tensors.proto` defines every bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from gem_api.errors import InvalidRequest
from gem_api.framing import PLAIN, Assembly, Packing, chunks, framed
from gem_api.layout import Vector
from gem_api.v1 import tensors_pb2 as pb
from gem_api.wire_names import WIRE_NAMES

if TYPE_CHECKING:
    from gem_api.conversions import ByteArray


class Encoder(ABC):
    """Encodes the gradients of one lease."""

    @abstractmethod
    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        """Generates the bytes of a gradient (float32, shape (P,)), at most CHUNK_BYTES at a time; the next may overwrite them.

        A second call with the same gradient, before `applied`, generates the same bytes: a resend. It ends the first.
        """

    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        """Generates these bytes as gRPC's frames; the first begins with `opening`."""
        return framed(self.pieces(packed), opening)

    def applied(self) -> None:  # noqa: B027
        """Call it when the last commit was applied, but not if it was rejected or lost. Most formats keep nothing of it."""


@dataclass(frozen=True)
class Format(ABC):
    """One wire format.

    Attributes:
        name: The name in options.
        dtype: The value in message headers.
        packing: The arrangement of the elements in the buffer that is sent.
    """

    name: str
    dtype: pb.WireDtype
    packing: Packing

    def nbytes(self, size: int) -> int:
        """Bytes of the buffer that is sent for `size` elements."""
        return self.packing.nbytes(size)

    def prepare(self) -> None:
        """Loads or compiles the conversions, so that the first transfer does not wait for that: it can take seconds."""
        import_module("gem_api.conversions")  # this loads numba, which float32 does not need

    @abstractmethod
    def assembly(self, into: Vector) -> Assembly:
        """Returns a receiver that decodes this format into `into` (float32, shape (P,))."""

    @abstractmethod
    def encoder(self, size: int) -> Encoder:
        """Returns an encoder for the gradients (float32, shape (size,)) of one lease, after `prepare`."""


class ThetaFormat(Format, Encoder):
    """A stateless format: it can carry θ as well as gradients, and is its own encoder."""

    def encoder(self, size: int) -> Encoder:
        self.prepare()
        return self


class Float32(ThetaFormat):
    """float32: the elements as in memory."""

    def prepare(self) -> None:
        """Does nothing: float32 needs no conversion."""

    def assembly(self, into: Vector) -> Assembly:
        return Assembly(into)

    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        return chunks(packed)


class BFloat16(ThetaFormat):
    """bfloat16: two bytes an element, rounded to nearest, ties to even."""

    def assembly(self, into: Vector) -> Assembly:
        from gem_api.conversions import decode_bfloat16

        return Assembly(into, self.packing, decode_bfloat16)

    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        from gem_api.conversions import encode_bfloat16

        for part, room in self.packing.pieces(packed.size):
            encode_bfloat16(packed[part], room)
            yield room


class Int8(Format):
    """int8: blocks of signed bytes with a scale each. The rounding error of one commit is added to the next."""

    def assembly(self, into: Vector) -> Assembly:
        from gem_api.conversions import decode_blocks

        return Assembly(into, self.packing, partial(decode_blocks, self.packing.elements))

    def encoder(self, size: int) -> Encoder:
        self.prepare()
        return FeedbackEncoder(size, self.packing)


class FeedbackEncoder(Encoder):
    """Encodes one lease's gradients g in int8 blocks, with error feedback: what is rounded off is added to the next commit.

    With a residual e, initially 0, it sends q = quantised(e + g). When that is applied, e ← e + g − q; until then e does not
    change. So a resend carries the same bytes, and a rejected or lost commit has no effect. |e| is at most half a
    quantisation step: max|e + g| / 254 of its block. Takes 8·P bytes, for e and its next value.

    Args:
        size: The number of elements P.
        packing: The block format.
    """

    def __init__(self, size: int, packing: Packing) -> None:
        self._packing = packing
        self._residual = np.zeros(size, np.float32)
        self._remainder = np.zeros(size, np.float32)
        # gRPC requests frames from its own thread, and may continue for some time after a stream was cancelled.
        self._lock = Lock()
        self._current: object = None

    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        """The bytes of e + g, with g in `packed` (float32, shape (P,)). Ends the iterator of an earlier call."""
        with self._lock:
            self._current = mine = object()
        return self._pieces(packed, mine)

    def applied(self) -> None:
        """Makes the rounding error of the last frames the new residual."""
        self._residual, self._remainder = self._remainder, self._residual

    def _pieces(self, gradient: Vector, mine: object) -> Iterator[ByteArray]:
        from gem_api.conversions import encode_blocks

        for part, room in self._packing.pieces(gradient.size):
            with self._lock:
                if self._current is not mine:
                    return
                encode_blocks(gradient[part], self._residual[part], self._remainder[part], self._packing.elements, room)
            yield room


FLOAT32 = Float32(WIRE_NAMES[0], pb.WIRE_DTYPE_FLOAT32, PLAIN)
BFLOAT16 = BFloat16(WIRE_NAMES[1], pb.WIRE_DTYPE_BFLOAT16, Packing(1, 0, 2))
INT8 = Int8(WIRE_NAMES[2], pb.WIRE_DTYPE_INT8_BLOCK, Packing(256, 4, 1))
WIRE_FORMATS: dict[str, Format] = {known.name: known for known in (FLOAT32, BFLOAT16, INT8)}


def wire_format(which: str | int) -> Format:
    """The format with this name or wire dtype. Raises InvalidRequest if there is none."""
    for known in WIRE_FORMATS.values():
        if which in (known.name, known.dtype):
            return known
    choices = ", ".join(f"{known.name} ({known.dtype})" for known in WIRE_FORMATS.values())
    raise InvalidRequest(f"wire dtype {which} is not valid: choose one of {choices}")


def theta_format_of(dtype: int) -> Format:
    """The format of θ that a message names; float32 if it names none. Raises InvalidRequest if there is no such format."""
    return wire_format(dtype) if dtype else FLOAT32


def as_theta_format(format_: Format) -> ThetaFormat:
    """The format of a θ that is no difference to an earlier one."""
    return format_ if isinstance(format_, ThetaFormat) else FLOAT32
