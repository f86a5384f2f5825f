"""Wire formats: what the elements of a gradient, or of θ, look like between two machines.

float32    4 bytes an element; nothing is lost, nothing is converted
bfloat16   2 bytes, float32's range, 8 significant bits
float16    2 bytes, 11 significant bits, magnitudes up to 65,504
int8       1 byte and a little, gradients only: blocks with a scale each, and error feedback

`v1/tensors.proto` defines them to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeVar

from gem_api.errors import InvalidRequest
from gem_api.framing import PLAIN, Assembly, Packing, chunk_frames, framed
from gem_api.layout import Vector
from gem_api.v1 import tensors_pb2 as pb

if TYPE_CHECKING:
    from gem_api.conversions import Bytes, Conversion


class Encoder(Protocol):
    """Turns one lease's gradients into frames."""

    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        """The frames that carry a gradient (float32, shape (P,)), each made when it is asked for; the first with `opening`.

        Called again with the same gradient, before `applied`, it gives the same bytes: a resend.
        """

    def applied(self) -> None:
        """To be called once the commit that was framed last is applied; not where it was refused or dropped."""


@dataclass(frozen=True)
class Format(ABC):
    """One wire format.

    Attributes:
        name: What users call it.
        dtype: What headers call it.
        packing: How the elements lie in the buffer that is sent.
    """

    name: str
    dtype: pb.WireDtype
    packing: Packing

    def nbytes(self, size: int) -> int:
        """Bytes of the buffer that is sent for `size` elements."""
        return self.packing.nbytes(size)

    def prepare(self) -> None:
        """Loads the conversions, or compiles them: seconds at worst, which the first transfer would take otherwise."""
        import_module("gem_api.conversions")  # and numba with it, which float32 does without

    @abstractmethod
    def assembly(self, into: Vector) -> Assembly:
        """Receives a buffer in this format into `into` (float32, shape (P,))."""

    @abstractmethod
    def encoder(self, size: int) -> Encoder:
        """Prepares, and returns an encoder for the gradients (float32, shape (size,)) of one lease."""


class ThetaFormat(Format):
    """A format that remembers nothing from one transfer to the next: fit for θ too, and its own encoder."""

    @abstractmethod
    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        """The frames that carry `packed` (float32, shape (P,)), each made when it is asked for; the first with `opening`."""

    def encoder(self, size: int) -> Encoder:
        self.prepare()
        return self

    def applied(self) -> None:
        """Changes nothing: what rounding took away stays away."""


class Float32(ThetaFormat):
    """The elements as they lie in memory."""

    def prepare(self) -> None:
        """Does nothing: there is nothing to convert."""

    def assembly(self, into: Vector) -> Assembly:
        return Assembly(into)

    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        return chunk_frames(packed, opening)


class Half(ThetaFormat):
    """Two bytes an element, rounded to nearest, ties to even."""

    def assembly(self, into: Vector) -> Assembly:
        return Assembly(into, self.packing, self._conversion().decode)

    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        return framed(self._pieces(packed), opening)

    def _pieces(self, packed: Vector) -> Iterator[Bytes]:
        encode = self._conversion().encode
        for part, room in self.packing.pieces(packed.size):
            encode(packed[part], room)
            yield room

    def _conversion(self) -> Conversion:
        from gem_api.conversions import HALVES

        return HALVES[self.name]


class Int8(Format):
    """Blocks of signed bytes with a scale each; what rounding takes from one commit goes into the next."""

    def assembly(self, into: Vector) -> Assembly:
        from gem_api.conversions import decode_blocks

        return Assembly(into, self.packing, partial(decode_blocks, self.packing.elements))

    def encoder(self, size: int) -> Encoder:
        from gem_api.error_feedback import FeedbackEncoder

        return FeedbackEncoder(size, self.packing)


FLOAT32 = Float32("float32", pb.WIRE_DTYPE_FLOAT32, PLAIN)
BFLOAT16 = Half("bfloat16", pb.WIRE_DTYPE_BFLOAT16, Packing(1, 0, 2))
FLOAT16 = Half("float16", pb.WIRE_DTYPE_FLOAT16, Packing(1, 0, 2))
INT8 = Int8("int8", pb.WIRE_DTYPE_INT8_BLOCK, Packing(256, 4, 1))
THETA_FORMATS: dict[str, ThetaFormat] = {known.name: known for known in (FLOAT32, BFLOAT16, FLOAT16)}
GRADIENT_FORMATS: dict[str, Format] = {**THETA_FORMATS, INT8.name: INT8}

Known = TypeVar("Known", bound=Format)


def gradient_format(which: str | int) -> Format:
    """The format for gradients of this name or wire dtype. Raises InvalidRequest where there is none."""
    return _known(which, GRADIENT_FORMATS, "gradients")


def theta_format(which: str | int) -> ThetaFormat:
    """The format for θ of this name or wire dtype. Raises InvalidRequest where there is none."""
    return _known(which, THETA_FORMATS, "the central variable")


def _known(which: str | int, formats: Mapping[str, Known], what: str) -> Known:
    for known in formats.values():
        if which in (known.name, known.dtype):
            return known
    choices = ", ".join(f"{known.name} ({known.dtype})" for known in formats.values())
    raise InvalidRequest(f"wire dtype {which} is not taken for {what}: choose one of {choices}")
