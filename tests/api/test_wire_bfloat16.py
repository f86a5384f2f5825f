"""bfloat16: bit for bit the rounding of IEEE 754, compared with two independent readings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gem_api.conversions import decode_bfloat16, encode_bfloat16
from gem_api.layout import Vector

Codes = npt.NDArray[np.uint16]
ALL_CODES = np.arange(1 << 16, dtype=np.uint16)
MAX_CODE = 0x7F7F  # of a finite value
SIGNIFICANT_BITS = 8


def narrow(values: npt.ArrayLike) -> Codes:
    packed = np.atleast_1d(np.asarray(values, np.float32))
    out = np.empty(2 * packed.size, np.uint8)
    encode_bfloat16(packed, out)
    return out.view("<u2")


def widen(codes: Codes) -> Vector:
    values = np.empty(codes.size, np.float32)
    decode_bfloat16(memoryview(codes.astype("<u2").tobytes()), values)
    return values


def float32(pattern: int) -> Vector:
    return np.array([pattern], np.uint32).view(np.float32)


def by_definition(code: int) -> float:
    """The value of a code, put together from its sign, exponent and fraction."""
    fraction_bits, bias = SIGNIFICANT_BITS - 1, 127
    exponent, fraction = (code & 0x7FFF) >> fraction_bits, code & (1 << fraction_bits) - 1
    sign = -1.0 if code >> 15 else 1.0
    if exponent == 2 * bias + 1:
        return sign * float("nan") if fraction else sign * float("inf")
    significand = fraction + (1 << fraction_bits if exponent else 0)
    return float(sign * significand * 2.0 ** (max(exponent, 1) - bias - fraction_bits))


# -- every code


def test_each_of_the_65536_codes_means_what_the_standard_says() -> None:
    expected = np.array([by_definition(int(code)) for code in ALL_CODES])
    widened = widen(ALL_CODES)
    assert np.array_equal(widened, expected, equal_nan=True)
    assert np.array_equal(np.signbit(widened), ALL_CODES >> 15)


# -- another implementation


def borders() -> Vector:
    """What the format can hold, halfway between each two neighbours, and one float32 to either side of that; beyond the
    largest value halfway to where the next would be."""
    lower = np.arange(MAX_CODE + 1, dtype=np.uint16)
    exact = widen(lower).astype(np.float64)
    halfway = (exact + np.append(exact[1:], 2 * exact[-1] - exact[-2])) / 2
    with np.errstate(over="ignore"):
        middle = halfway.astype(np.float32)
    return np.concatenate(
        [widen(ALL_CODES), middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    )


def test_torch_rounds_any_bit_pattern_alike_and_all_borders() -> None:
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    values = np.concatenate([patterns.view(np.float32), borders(), -borders()])
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(values)
    assert np.array_equal(narrow(values)[numbers], theirs[numbers])
    assert np.isnan(widen(narrow(values[~numbers]))).all()


# -- what is not a number, or hardly one


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF, 0x7FFF8000, 0x7F807FFF])
def test_a_nan_stays_one_whatever_its_payload(pattern: int) -> None:
    """Rounding its bits up would turn some into −0, cutting them off others into infinity."""
    for sign in (0, 1 << 31):
        narrowed = narrow(float32(pattern | sign))
        assert np.isnan(widen(narrowed)).all()
        assert narrowed[0] >> 15 == sign >> 31


# -- loops


@pytest.mark.parametrize("direction", [narrow, widen])
def test_the_length_of_a_buffer_changes_no_element(direction: Callable[[Any], Any]) -> None:
    """Vector lanes and what is left over at the end compute alike, wherever the buffer begins."""
    codes = np.random.default_rng(5).integers(0, 1 << 16, 200, dtype=np.uint16)
    given_ = codes if direction is widen else np.random.default_rng(6).normal(size=200).astype(np.float32)
    whole = direction(given_)
    for begin in (0, 1, 7):
        for end in range(begin, 80):
            assert np.array_equal(direction(given_[begin:end]), whole[begin:end], equal_nan=direction is widen)
