"""All wire formats: a buffer arrives complete, chunk by chunk, and invalid chunks are rejected."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from gem_api import wire
from gem_api.errors import IncompleteTransfer, InvalidRequest
from gem_api.framing import CHUNK_BYTES, Assembly, ChunkView, Packing, empty, parse_frame
from gem_api.layout import Vector
from gem_api.v1 import tensors_pb2, training_pb2
from hypothesis import given
from hypothesis import strategies as st
from kit.core import bits
from kit.process import python

FORMATS = wire.WIRE_FORMATS
PER_CHUNK = {"float32": 262_144, "bfloat16": 524_288, "int8": 1_032_192}  # elements
every_format = pytest.mark.parametrize("name", FORMATS)


def chunks_of(name: str, values: Vector) -> list[ChunkView]:
    frames = FORMATS[name].encoder(values.size).frames(values)
    return [chunk for frame in frames if (chunk := parse_frame(frame, training_pb2.CommitRequest).chunk)]


def ones(size: int) -> Vector:
    """A gradient that every format carries exactly."""
    return np.ones(size, np.float32)


# -- which formats there are


def test_every_dtype_of_the_contract_has_a_format_which_is_found_by_its_name_too() -> None:
    stated = set(tensors_pb2.WireDtype.values()) - {tensors_pb2.WIRE_DTYPE_UNSPECIFIED}
    assert {known.dtype for known in FORMATS.values()} == stated
    assert all(wire.wire_format(name) is wire.wire_format(int(known.dtype)) is known for name, known in FORMATS.items())


@pytest.mark.parametrize("which", ["float16", "", 0, 4, -1])
def test_an_unknown_format_is_refused_with_the_choice_there_is(which: str | int) -> None:
    with pytest.raises(InvalidRequest, match=rf"{which} .*float32 \(1\), bfloat16 \(2\), int8 \(3\)"):
        wire.wire_format(which)


@pytest.mark.long
def test_float32_does_without_numba() -> None:
    """A worker that does not convert does not pay for the compiler's memory."""
    code = """if True:
        import sys
        import numpy as np
        from gem_api import wire
        from gem_api.framing import parse_frame
        from gem_api.v1 import training_pb2
        values, into = np.ones(3, "<f4"), np.zeros(3, "<f4")
        assembly = wire.FLOAT32.assembly(into)
        for frame in wire.FLOAT32.encoder(3).frames(values):
            assembly.add(parse_frame(frame, training_pb2.CommitRequest).chunk)
        assert into.all() and assembly.complete
        print("numba" in sys.modules)
        wire.BFLOAT16.prepare()
        print("numba" in sys.modules)
    """
    done = python("-c", code)
    assert done.stdout == "False\nTrue\n", done.stderr


# -- out and in


@every_format
def test_a_buffer_arrives_in_chunks_that_cover_it(name: str) -> None:
    for chunks, more in product([0, 1, 2], [-257, -1, 0, 1, 256]):
        size = chunks * PER_CHUNK[name] + more
        _require_covered(name, size if size > 0 else 300 + more)  # else around the first block's border


def _require_covered(name: str, size: int) -> None:
    sent, received = ones(size), empty(size)
    assembly = FORMATS[name].assembly(received)
    pieces = chunks_of(name, sent)
    assert len(pieces) == -(-size // PER_CHUNK[name])
    filled = [assembly.add(piece) for piece in pieces]
    assembly.require_complete()
    assert all(piece.base is received for piece in filled)
    assert [piece.size for piece in filled[:-1]] == [PER_CHUNK[name]] * (len(pieces) - 1)
    assert sum(piece.size for piece in filled) == size
    assert sum(len(piece.data) for piece in pieces) == FORMATS[name].nbytes(size)
    assert all(len(piece.data) <= CHUNK_BYTES for piece in pieces)
    assert bits(received) == bits(sent)


@every_format
def test_chunks_of_any_whole_units_are_taken_wherever_they_lie(name: str) -> None:
    """Another client may cut finer than ours; and a chunk's bytes begin at any address."""
    fmt, size = FORMATS[name], 1000
    values = np.random.default_rng(1).normal(size=size).astype("<f4")
    (whole,) = chunks_of(name, values)
    at_once, in_pieces = empty(size), empty(size)
    fmt.assembly(at_once).add(whole)
    for shift in range(4):
        in_pieces[:] = np.nan
        assembly = fmt.assembly(in_pieces)
        borders = [*range(0, len(whole.data), 3 * fmt.packing.block), len(whole.data)]
        for begin, end in pairwise(borders):
            moved = memoryview(bytes(shift) + whole.data[begin:end])[shift:]
            assembly.add(ChunkView(begin, moved))
        assert assembly.complete
        assert bits(in_pieces) == bits(at_once)


@every_format
def test_a_frame_is_made_when_it_is_asked_for(name: str) -> None:
    """So gRPC sends the first while the next is encoded: what changes before a chunk's turn is sent as changed."""
    values = ones(PER_CHUNK[name] + 1)
    frames = FORMATS[name].encoder(values.size).frames(values)
    next(frames)
    values[-1] = 2
    received = empty(values.size)
    assembly = FORMATS[name].assembly(received)
    assembly.add(chunks_of(name, ones(values.size))[0])
    (_, last) = parse_frame(next(frames), training_pb2.CommitRequest)
    assert last is not None
    assembly.add(last)
    assert received[-1] == 2


@every_format
def test_a_resend_is_the_same_bytes(name: str) -> None:
    values = np.random.default_rng(2).normal(size=PER_CHUNK[name] + 5).astype("<f4")
    encoder = FORMATS[name].encoder(values.size)
    first = list(encoder.frames(values))
    next(encoder.frames(values))  # a try that breaks off
    assert list(encoder.frames(values)) == first


@pytest.mark.parametrize("fmt", [wire.FLOAT32, wire.BFLOAT16])
def test_a_format_for_a_whole_theta_remembers_nothing(fmt: wire.ThetaFormat) -> None:
    theta = np.random.default_rng(3).normal(size=999).astype("<f4")
    assert wire.as_theta_format(fmt) is fmt
    encoder = fmt.encoder(theta.size)
    first = list(encoder.frames(theta))
    encoder.applied()
    assert list(encoder.frames(theta)) == first == list(fmt.frames(theta))


@every_format
def test_values_that_are_only_to_be_read_can_be_sent(name: str) -> None:
    values = np.frombuffer(ones(300).tobytes(), "<f4")
    assert not values.flags.writeable
    assert sum(len(piece.data) for piece in chunks_of(name, values)) == FORMATS[name].nbytes(300)


# -- what is refused


def view(offset: int, size: int) -> ChunkView:
    return ChunkView(offset, memoryview(b"\x3f" * size))


# 600 elements: 2,400 bytes of float32; 1,200 of bfloat16; of int8 two whole blocks of 260 bytes and one of 92.
REFUSED = {
    "cuts an element": ("bfloat16", [view(0, 3)], "the chunk has 3 bytes: .*a multiple of 2"),
    "cuts a block": ("int8", [view(0, 100)], "the chunk has 100 bytes: .*a multiple of 260 or the rest of the buffer"),
    "overlaps the one before": ("float32", [view(0, 8), view(4, 8)], "byte 8 was expected"),
    "begins far beyond the end": ("float32", [view(0, 8), view(2**63, 4)], "byte 8 was expected"),
    "runs over the end": ("float32", [view(0, 2392), view(2392, 12)], "exceeds the buffer's 2400 bytes"),
    "runs over the last block": ("int8", [view(0, 520), view(520, 260)], "exceeds the buffer's 612 bytes"),
    "counts float32's bytes": ("bfloat16", [view(0, 2400)], "exceeds the buffer"),
    "is empty at the end": ("int8", [view(0, 612), view(612, 0)], "0 bytes"),
    "is too large": ("int8", [view(0, 260 * 4033)], f"{260 * 4033} bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_chunk_is_refused_and_writes_nothing_where_it(case: str) -> None:
    name, chunks, why = REFUSED[case]
    memory = np.zeros(800, np.float32)
    assembly = FORMATS[name].assembly(memory[100:700])
    for chunk in chunks[:-1]:
        assembly.add(chunk)
    before = bits(memory)
    with pytest.raises(IncompleteTransfer, match=why):
        assembly.add(chunks[-1])
    assert bits(memory) == before


@given(
    st.sampled_from([Packing(1, 0, 4), Packing(1, 0, 2), Packing(4, 3, 1), Packing(3, 4, 2)]),
    st.integers(1, 14),
    st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 16)), max_size=12),
)
def test_only_whole_blocks_in_order_complete_a_buffer(packing: Packing, size: int, pieces: list[tuple[int, int]]) -> None:
    """Against a plain reading of the contract: the places where a chunk may begin or end, written out one by one."""
    borders = [0]
    for first in range(0, size, packing.elements):
        borders.append(borders[-1] + packing.head + min(packing.elements, size - first) * packing.item)
    unpacked: list[int] = []
    assembly = Assembly(np.zeros(size, np.float32), packing, lambda data, into: unpacked.append(into.size))
    due = 0
    for shift, length in pieces:
        offset = due + shift
        legal = shift == 0 and length > 0 and due + length in borders
        try:
            assembly.add(view(offset, length))
            assert legal
            due += length
        except IncompleteTransfer:
            assert not legal
    assert assembly.complete == (due == borders[-1])
    assert sum(unpacked) == min(size, borders.index(due) * packing.elements)


@given(st.builds(Packing, st.integers(1, 9), st.integers(0, 5), st.integers(1, 4)), st.integers(0, 100))
def test_elements_and_bytes_count_each_other(packing: Packing, size: int) -> None:
    assert packing.size(packing.nbytes(size)) == size
    assert packing.nbytes(packing.elements) == packing.block
