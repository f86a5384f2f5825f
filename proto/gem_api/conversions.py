"""Compiled conversions from float32 to the narrower wire formats and back. Each is one vectorised loop without the GIL.

The loops work on the bits of floats (IEEE 754: sign, exponent, fraction), as `v1/tensors.proto` defines the formats. They
cast every result back to 32 bits: numba widens integers, which would halve the elements for each vector instruction.
Importing this module loads numba, and compiles the loops if they are not in numba's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numpy import float32, int8, int32

from gem_api.layout import Vector

ByteArray = npt.NDArray[np.uint8]
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000
_SMALLEST = float32(2.0**-119)  # a block below this would need a subnormal scale
_MAX = np.finfo(np.float32).max
_NAN = float32(np.nan)


class Conversion(NamedTuple):
    """The two directions of a format: `encode` turns values (float32, shape (n,)) into bytes (uint8), `decode` the reverse."""

    encode: Callable[[Vector, ByteArray], None]
    decode: Callable[[memoryview, Vector], None]


def _input(dtype: Any) -> Any:
    """The type of a read-only one-dimensional array, such as a view of a received frame, whose address may be unaligned."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _output(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C")


# -- bfloat16: the upper half of a float32


@njit(types.void(_input(types.int32), _output(types.uint16)), **_OPTIONS)
def _to_bfloat16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        value = bits[i]
        # Adds half of the last kept place, or one less if that place is even, so that ties end up even.
        rounded = value + 0x7FFF + (value >> 16 & 1)
        nan = value | 0x7FC00000
        out[i] = int32(rounded if value & _MAGNITUDE <= _INFINITY else nan) >> 16


@njit(types.void(_input(types.uint16), _output(types.int32)), **_OPTIONS)
def _from_bfloat16(halves, bits):  # type: ignore[no-untyped-def]
    for i in range(halves.size):
        bits[i] = halves[i] << 16


# -- float16: 5 bits of exponent, 10 of fraction


@njit(types.void(_input(types.int32), _output(types.uint16)), **_OPTIONS)
def _to_float16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        magnitude = int32(bits[i] & _MAGNITUDE)
        # From 2^-14 on: the exponent's bias goes from 127 to 15, and 13 bits are rounded off as above.
        normal = magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1) >> 13
        # Below: a multiple of 2^-24, which is the last place of a float32 from 0.5 to 1; adding 0.5 rounds to it.
        subnormal = float32(int32(magnitude).view(float32) + float32(0.5)).view(int32) - 0x3F000000
        half = int32(normal if magnitude >= 0x38800000 else subnormal)
        special = int32(0x7C00 if magnitude <= _INFINITY else 0x7E00)
        half = int32(half if magnitude < 0x47800000 else special)  # from 2^16 on; just below it, rounding gives an infinity
        out[i] = int32(half | (bits[i] >> 16 & 0x8000))


@njit(types.void(_input(types.uint16), _output(types.int32)), **_OPTIONS)
def _from_float16(halves, bits):  # type: ignore[no-untyped-def]
    for i in range(halves.size):
        magnitude = int32(halves[i] & 0x7FFF)
        shifted = int32(magnitude << 13)
        subnormal = float32(float32(magnitude) * float32(2.0**-24)).view(int32)
        normal = int32(shifted + 0x38000000)
        special = int32(shifted + 0x70000000)  # the largest exponent of one is the largest of the other
        wide = normal if magnitude < 0x7C00 else special
        wide = wide if magnitude >= 0x0400 else subnormal
        bits[i] = wide | (halves[i] & 0x8000) << 16


# -- int8: blocks with a scale


@njit(
    types.void(_input(types.float32), _input(types.float32), _output(types.float32), types.intp, _output(types.uint8)),
    **_OPTIONS,
)
def encode_blocks(gradient, residual, remainder, elements, out):  # type: ignore[no-untyped-def]
    """Encodes e + g in int8 blocks, and keeps the rounding error.

    Args:
        gradient: g: float32, shape (n,).
        residual: e: float32, shape (n,).
        remainder: float32, shape (n,), another array: receives e + g minus the decoded bytes.
        elements: Elements in a block.
        out: uint8, shape (n + 4·ceil(n / elements),): receives the bytes.
    """
    at = 0
    for begin in range(0, gradient.size, elements):
        end = min(begin + elements, gradient.size)
        size = end - begin
        sums, g, e = remainder[begin:end], gradient[begin:end], residual[begin:end]
        for i in range(size):
            sums[i] = e[i] + g[i]
        # Without their sign, floats are ordered like their bits; infinities and NaNs come last.
        bits, top = sums.view(int32), int32(0)
        for i in range(size):
            top = max(top, int32(bits[i] & _MAGNITUDE))
        largest = int32(top).view(float32)
        quanta = out[at + 4 : at + 4 + size].view(int8)
        if _SMALLEST <= largest <= _MAX:
            scale, inverse = largest / float32(127), float32(127) / largest
            for i in range(size):
                quantum = np.rint(sums[i] * inverse)
                quanta[i] = int8(int32(quantum))
                sums[i] = sums[i] - quantum * scale
        else:
            scale = float32(0) if largest < _SMALLEST else _NAN
            quanta[:] = 0
        word = float32(scale).view(int32)
        for i in range(4):
            out[at + i] = word >> 8 * i & 0xFF
        at += 4 + size


@njit(types.void(_input(types.uint8), types.intp, _output(types.float32)), **_OPTIONS)
def _from_blocks(data, elements, values):  # type: ignore[no-untyped-def]
    at = 0
    for begin in range(0, values.size, elements):
        end = min(begin + elements, values.size)
        word = int32(data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24)
        scale = int32(word).view(float32)
        scale = scale if scale >= 0 else _NAN  # no encoder writes a negative scale: treat the block as NaN
        quanta, block = data[at + 4 : at + 4 + end - begin], values[begin:end]
        for i in range(end - begin):
            block[i] = scale * float32(int8(quanta[i]))
        at += 4 + end - begin


def decode_blocks(elements: int, data: memoryview, values: Vector) -> None:
    """Decodes int8 blocks of `elements` into `values` (float32, shape (n,)).

    If a block's scale is negative, infinite or NaN, its elements become NaNs or infinities.
    """
    _from_blocks(np.frombuffer(data, np.uint8), elements, values)


# -- the conversions of the 16-bit formats, by name


def _halves(narrow: Callable[[Any, Any], None], widen: Callable[[Any, Any], None]) -> Conversion:
    def encode(values: Vector, out: ByteArray) -> None:
        narrow(values.view(np.int32), out.view(np.uint16))

    def decode(data: memoryview, values: Vector) -> None:
        widen(np.frombuffer(data, np.uint16), values.view(np.int32))

    return Conversion(encode, decode)


HALVES = {"bfloat16": _halves(_to_bfloat16, _from_bfloat16), "float16": _halves(_to_float16, _from_float16)}
