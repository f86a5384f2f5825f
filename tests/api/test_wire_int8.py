"""int8 blocks: the bytes match the contract's comments, and rounding errors are added to the next commit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from gem_api import wire
from gem_api.conversions import encode_blocks
from gem_api.errors import NonFiniteGradient
from gem_api.framing import ChunkView, empty, parse_frame
from gem_api.layout import Vector
from gem_api.v1 import training_pb2
from gem_server.core.central_variable import require_finite
from gem_server.rules.base import largest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core import bits

BLOCK = 256
Blocks = list[tuple[float, tuple[int, ...]]]  # scale and q of each


def made_up(size: int, count: int, seed: int, exponent: float, spread: float) -> list[Vector]:
    """Gradients of all sizes that float32 has, up to 2⁹⁹, with some zeros; those of one block differ by up to 10^spread."""
    random = np.random.default_rng(seed)
    sizes = 10.0 ** (exponent + spread * random.uniform(-0.5, 0.5, size))
    values = random.standard_normal((count, size)) * sizes * (random.random((count, size)) < 0.9)
    return list(values.clip(-(2.0**99), 2.0**99).astype(np.float32))


GRADIENTS = st.builds(made_up, st.integers(1, 600), st.integers(1, 6), st.integers(0, 99), st.floats(-45, 30), st.floats(0, 20))
few = settings(max_examples=50)


def encoded(encoder: wire.Encoder, gradient: Vector) -> bytes:
    chunks = (parse_frame(frame, training_pb2.CommitRequest).chunk for frame in encoder.frames(gradient))
    return b"".join(chunk.data for chunk in chunks if chunk is not None)


def read_by_the_comments(data: bytes, size: int) -> Blocks:
    """A reader written from the contract's comments alone."""
    blocks, at = [], 0
    for first in range(0, size, BLOCK):
        count = min(BLOCK, size - first)
        scale, *quanta = struct.unpack_from(f"<f{count}b", data, at)
        blocks.append((scale, tuple(quanta)))
        at += 4 + count
    assert at == len(data)
    return blocks


def values_of(blocks: Blocks) -> Vector:
    with np.errstate(over="ignore"):
        return np.concatenate([np.float32(scale) * np.array(quanta, np.float32) for scale, quanta in blocks])


def decoded(data: bytes, size: int) -> Vector:
    into = empty(size)
    assembly = wire.INT8.assembly(into)
    assembly.add(ChunkView(0, memoryview(data)))
    assert assembly.complete
    return into


def fresh(size: int) -> wire.Encoder:
    return wire.INT8.encoder(size)


# -- the bytes


@few
@given(GRADIENTS)
def test_the_bytes_are_those_that_the_contract_describes(gradients: list[Vector]) -> None:
    gradient = gradients[0]
    data = encoded(fresh(gradient.size), gradient)
    assert len(data) == wire.INT8.nbytes(gradient.size)
    blocks = read_by_the_comments(data, gradient.size)
    for first, (scale, quanta) in zip(range(0, gradient.size, BLOCK), blocks, strict=True):
        block = gradient[first : first + BLOCK].astype(np.float64)
        largest = np.abs(block).max()
        if largest < 2.0**-119:
            assert (scale, set(quanta)) == (0, {0})
            continue
        assert scale == np.float32(largest / 127)
        assert max(map(abs, quanta)) == 127
        # Halfway cases may fall to either side of float32's last place.
        assert np.abs(quanta - block / scale).max() <= 0.5 + 1e-4
    assert bits(decoded(data, gradient.size)) == bits(values_of(blocks))


def test_halfway_goes_to_the_even_step() -> None:
    gradient = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], np.float32)
    assert read_by_the_comments(encoded(fresh(8), gradient), 8) == [(1.0, (127, 0, 2, 2, 0, -2, -2, 126))]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-38, 2.0**-119 - 2.0**-143])
def test_a_block_of_next_to_nothing_is_zeros_with_scale_zero(value: float) -> None:
    gradient = np.full(300, value, np.float32)
    assert encoded(fresh(300), gradient) == bytes(wire.INT8.nbytes(300))
    ((scale, _),) = read_by_the_comments(encoded(fresh(2), np.full(2, 2.0**-119, np.float32)), 2)
    assert scale >= np.finfo(np.float32).tiny, "the smallest block that counts has a normal scale"


def test_the_largest_of_values_does_not_run_over_127() -> None:
    """Whatever the division's last bit: 127.5 would wrap around to −128."""
    largest = np.random.default_rng(0).uniform(1, 2, 20_000).astype(np.float32)
    gradient = np.repeat(largest, BLOCK)  # a block each
    gradient[1::2] *= -1
    data = np.frombuffer(encoded(fresh(gradient.size), gradient), np.int8).reshape(-1, 4 + BLOCK)
    assert (data[:, 4::2] == 127).all()
    assert (data[:, 5::2] == -127).all()


@pytest.mark.parametrize(("value", "place"), [(np.nan, 256), (-np.nan, 300), (np.inf, 300), (-np.inf, 511)])
def test_what_is_no_number_makes_nans_of_its_block_and_of_no_other(value: float, place: int) -> None:
    gradient = np.ones(700, np.float32)
    gradient[place] = value
    data = encoded(fresh(700), gradient)
    scale, quanta = read_by_the_comments(data, 700)[1]
    assert math.isnan(scale)
    assert not any(quanta)
    received = decoded(data, 700)
    assert np.isnan(received[256:512]).all()
    assert (received[:256] == 1).all()
    assert (received[512:] == 1).all()


# -- hostile scales


@pytest.mark.parametrize("scale", [np.nan, -np.nan, np.inf, -np.inf, -1.0, -1e-45, 3e38, 1e30])
@pytest.mark.parametrize("quantum", [0, 1, -127])
def test_a_hostile_scale_makes_values_that_the_server_refuses(scale: float, quantum: int) -> None:
    data = struct.pack("<f256b", 1.0, *[1] * 256) + struct.pack("<f3b", scale, *[quantum] * 3)
    values = decoded(data, 259)
    require_finite(values[:256], largest(1.0), "gradient")
    if scale > 0 and quantum == 0 and scale < np.inf:
        assert not values[256:].any()  # however large, nothing of it
    elif scale == 1e30 and quantum == 1:
        require_finite(values, largest(1.0), "gradient")  # the largest value that there may be
    else:
        with pytest.raises(NonFiniteGradient):
            require_finite(values, largest(1.0), "gradient")


def test_a_scale_of_minus_zero_is_zero() -> None:
    assert not decoded(struct.pack("<f2b", -0.0, 127, -127), 2).any()


@given(st.binary(min_size=260, max_size=260))
def test_any_bytes_are_read_as_the_contract_says(data: bytes) -> None:
    ((scale, quanta),) = read_by_the_comments(data, 256)
    expected = values_of([(scale if scale >= 0 else math.nan, quanta)])
    assert np.array_equal(decoded(data, 256), expected, equal_nan=True)


# -- error feedback


@few
@given(GRADIENTS)
def test_the_sum_of_what_was_sent_is_within_a_step_of_the_sum_of_the_gradients(gradients: list[Vector]) -> None:
    size = gradients[0].size
    encoder = fresh(size)
    sent, wanted, rounding = np.zeros(size), np.zeros(size), np.zeros(size)
    for gradient in gradients:
        blocks = read_by_the_comments(encoded(encoder, gradient), size)
        encoder.applied()
        sent += values_of(blocks)
        wanted += gradient
        step = np.repeat([max(scale, 2.0**-119) for scale, _ in blocks], BLOCK)[:size]
        rounding += step * 127 * 2.0**-22  # float32's own, of e + g and of what is left
        assert (np.abs(sent - wanted) <= step / 2 + rounding).all()


@few
@given(GRADIENTS, st.data())
def test_a_commit_that_was_not_applied_leaves_no_trace(gradients: list[Vector], data: st.DataObject) -> None:
    """Refused or dropped, whole or half sent, or a NaN: the commits after it are what they would have been without."""
    size = gradients[0].size
    disturbed, undisturbed = fresh(size), fresh(size)
    for gradient in gradients:
        refused = data.draw(st.sampled_from([np.full(size, np.nan, np.float32), -gradient, gradient * 3]))
        if data.draw(st.booleans()):
            encoded(disturbed, refused)
        else:
            next(disturbed.frames(refused))
        assert encoded(disturbed, gradient) == encoded(undisturbed, gradient)
        disturbed.applied()
        undisturbed.applied()


def test_a_try_that_was_given_up_ends_and_disturbs_nothing() -> None:
    """gRPC's thread may go on asking for frames of a stream that was cancelled, while the next try is under way or done."""
    size = 3 * 4032 * BLOCK
    gradient = np.random.default_rng(7).normal(size=size).astype(np.float32)
    encoder, undisturbed = fresh(size), fresh(size)
    given_up = encoder.frames(gradient.copy())
    next(given_up)
    again = encoder.frames(gradient)
    next(again)
    assert list(given_up) == []
    for _ in again:
        pass
    encoder.applied()
    late = encoder.frames(gradient)
    next(late)
    encoded(undisturbed, gradient)
    undisturbed.applied()
    assert encoded(encoder, gradient) == encoded(undisturbed, gradient)
    assert list(late) == []


# -- the loop


def test_the_residual_is_what_the_bytes_do_not_say() -> None:
    rng = np.random.default_rng(8)
    for size in (1, 255, 256, 257, 1000):
        gradient, residual = rng.normal(size=size).astype(np.float32), rng.normal(size=size).astype(np.float32)
        before, remainder, out = residual.copy(), empty(size), np.empty(wire.INT8.nbytes(size), np.uint8)
        encode_blocks(gradient, residual, remainder, BLOCK, out)
        sent = values_of(read_by_the_comments(out.tobytes(), size))
        assert bits(remainder) == bits(residual + gradient - sent)
        assert bits(residual) == bits(before)
