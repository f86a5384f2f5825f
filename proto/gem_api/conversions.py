"""Compiled conversions from float32 to the narrower wire formats and back. Each is one vectorised loop without the GIL.

The loops work on the bits of floats (IEEE 754: sign, exponent, fraction), as `v1/tensors.proto` defines the formats. They
cast every result back to 32 bits: numba widens integers, which would halve the elements for each vector instruction.
Importing this module loads numba, and compiles the loops if they are not in numba's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numpy import float32, int8, int32

from gem_api.compiled import compiled
from gem_api.layout import Vector

ByteArray = npt.NDArray[np.uint8]
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000
_SMALLEST = float32(2.0**-119)  # a block below this would need a subnormal scale
_MAX = np.finfo(np.float32).max
_NAN = float32(np.nan)


def _input(dtype: Any) -> Any:
    """The type of a read-only one-dimensional array, such as a view of a received frame, whose address may be unaligned."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _output(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C")


# -- bfloat16: the upper half of a float32


@compiled(types.void(_input(types.int32), _output(types.uint16)), **_OPTIONS)
def _to_bfloat16(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        value = bits[i]
        # Adds half of the last kept place, or one less if that place is even, so that ties end up even.
        rounded = value + 0x7FFF + (value >> 16 & 1)
        nan = value | 0x7FC00000
        out[i] = int32(rounded if value & _MAGNITUDE <= _INFINITY else nan) >> 16


@compiled(types.void(_input(types.uint16), _output(types.int32)), **_OPTIONS)
def _from_bfloat16(halves, bits):  # type: ignore[no-untyped-def]
    for i in range(halves.size):
        bits[i] = halves[i] << 16


def encode_bfloat16(values: Vector, out: ByteArray) -> None:
    """Encodes `values` (float32, shape (n,)) into `out` (uint8, shape (2·n,)), rounded to nearest, ties to even."""
    _to_bfloat16(values.view(np.int32), out.view(np.uint16))


def decode_bfloat16(data: memoryview, values: Vector) -> None:
    """Decodes 2·n bytes into `values` (float32, shape (n,))."""
    _from_bfloat16(np.frombuffer(data, np.uint16), values.view(np.int32))


# -- int8: blocks with a scale


@compiled(**_OPTIONS)
def _largest(values):  # type: ignore[no-untyped-def]
    """The largest absolute value, or a NaN or an infinity. Without their sign, floats are ordered like their bits."""
    bits, top = values.view(int32), int32(0)
    for i in range(bits.size):
        top = max(top, int32(bits[i] & _MAGNITUDE))
    return int32(top).view(float32)


@compiled(**_OPTIONS)
def _write_scale(scale, out, at):  # type: ignore[no-untyped-def]
    word = float32(scale).view(int32)
    for i in range(4):
        out[at + i] = word >> 8 * i & 0xFF


@compiled(**_OPTIONS)
def _read_scale(data, at):  # type: ignore[no-untyped-def]
    word = int32(data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24)
    scale = int32(word).view(float32)
    return scale if scale >= 0 else _NAN  # no encoder writes a negative scale: treat the block as NaN


@compiled(
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
        largest = _largest(sums)
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
        _write_scale(scale, out, at)
        at += 4 + size


@compiled(types.void(_input(types.float32), _output(types.float32), types.intp, _output(types.uint8)), **_OPTIONS)
def encode_difference(theta, held, elements, out):  # type: ignore[no-untyped-def]
    """Encodes θ minus what the worker holds in int8 blocks, and adds what the worker will decode to what it holds.

    Args:
        theta: θ: float32, shape (n,), finite.
        held: float32, shape (n,), finite, another array: changed to what the worker holds then.
        elements: Elements in a block.
        out: uint8, shape (n + 4·ceil(n / elements),): receives the bytes.
    """
    at, block = 0, np.empty(elements, float32)
    for begin in range(0, theta.size, elements):
        end = min(begin + elements, theta.size)
        size = end - begin
        difference, target, known = block[:size], theta[begin:end], held[begin:end]
        for i in range(size):
            step = target[i] - known[i]
            difference[i] = min(max(step, -_MAX), _MAX)
        largest = _largest(difference)
        quanta = out[at + 4 : at + 4 + size].view(int8)
        scale, inverse = float32(0), float32(0)
        if largest >= _SMALLEST:
            scale, inverse = largest / float32(127), float32(127) / largest
        for i in range(size):
            quantum = int32(np.rint(difference[i] * inverse))
            quanta[i] = int8(quantum)
            known[i] = known[i] + scale * float32(quantum)  # as `add_blocks` does: also +0, which makes +0 of -0
        _write_scale(scale, out, at)
        at += 4 + size


@compiled(types.void(_input(types.uint8), types.intp, _output(types.float32)), **_OPTIONS)
def add_blocks(data, elements, held):  # type: ignore[no-untyped-def]
    """Adds the int8 blocks of `encode_difference` to what the worker holds, with the same rounding.

    Args:
        data: uint8, shape (n + 4·ceil(n / elements),).
        elements: Elements in a block.
        held: float32, shape (n,): changed.
    """
    at = 0
    for begin in range(0, held.size, elements):
        end = min(begin + elements, held.size)
        scale = _read_scale(data, at)
        quanta, known = data[at + 4 : at + 4 + end - begin], held[begin:end]
        for i in range(end - begin):
            known[i] = known[i] + scale * float32(int8(quanta[i]))
        at += 4 + end - begin


@compiled(types.void(_input(types.uint8), types.intp, _output(types.float32)), **_OPTIONS)
def _from_blocks(data, elements, values):  # type: ignore[no-untyped-def]
    at = 0
    for begin in range(0, values.size, elements):
        end = min(begin + elements, values.size)
        scale = _read_scale(data, at)
        quanta, block = data[at + 4 : at + 4 + end - begin], values[begin:end]
        for i in range(end - begin):
            block[i] = scale * float32(int8(quanta[i]))
        at += 4 + end - begin


def decode_blocks(elements: int, data: memoryview, values: Vector) -> None:
    """Decodes int8 blocks of `elements` into `values` (float32, shape (n,)).

    If a block's scale is negative, infinite or NaN, its elements become NaNs or infinities.
    """
    _from_blocks(np.frombuffer(data, np.uint8), elements, values)
