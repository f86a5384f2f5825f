"""Tensor frames: the hand-written framing agrees with protobuf, and rejects buffers that are not exactly covered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gem_api.errors import IncompleteTransfer, InvalidRequest
from gem_api.framing import Assembly, ChunkView, bytes_of, chunk_frame, parse_frame
from gem_api.v1 import tensors_pb2, training_pb2
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

STREAMED = [
    training_pb2.InitializeCentralRequest,
    training_pb2.PullResponse,
    training_pb2.CommitRequest,
    training_pb2.CommitResponse,
]
UINT64 = st.integers(0, 2**64 - 1)
OPENERS: dict[str, st.SearchStrategy[Message]] = {
    "InitializeCentralRequest": st.builds(training_pb2.InitializeCentralHeader, lease_id=st.text(max_size=40)),
    "PullResponse": st.builds(
        training_pb2.PullHeader, version=UINT64, layout_fingerprint=st.binary(max_size=40), must_initialize=st.booleans()
    ),
    "CommitRequest": st.builds(
        training_pb2.CommitHeader,
        lease_id=st.text(max_size=40),
        sequence=UINT64,
        base_version=UINT64,
        loss=st.none() | st.floats(),
        sample_count=UINT64,
    ),
    "CommitResponse": st.builds(training_pb2.CommitResult, sequence=UINT64, ticket=UINT64, version=UINT64),
}


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Any message of the four streams: a header, a chunk, both or nothing."""
    message_type = draw(st.sampled_from(STREAMED))
    opener = message_type.DESCRIPTOR.fields_by_number[1].name
    chunk = st.builds(tensors_pb2.Chunk, offset=UINT64 | st.integers(0, 300), data=st.binary(max_size=300))
    parts: dict[str, st.SearchStrategy[Any]] = {opener: OPENERS[message_type.DESCRIPTOR.name], "chunk": chunk}
    fields = draw(st.fixed_dictionaries({}, optional=parts))
    return message_type(**fields)


def by_protobuf(frame: bytes, message_type: Any) -> Any:
    """What protobuf alone makes of a frame: its header or None, its chunk's (offset, data) or None; or InvalidRequest."""
    try:
        message = message_type.FromString(frame)
    except DecodeError:
        return InvalidRequest
    opener = message_type.DESCRIPTOR.fields_by_number[1].name
    if not message.HasField(opener) and not message.HasField("chunk"):
        return InvalidRequest
    header = getattr(message, opener).SerializeToString(deterministic=True) if message.HasField(opener) else None
    return header, (message.chunk.offset, message.chunk.data) if message.HasField("chunk") else None


def by_us(frame: bytes, message_type: Any) -> Any:
    try:
        header, chunk = parse_frame(frame, message_type)
    except InvalidRequest:
        return InvalidRequest
    seen = header.SerializeToString(deterministic=True) if header is not None else None
    return seen, (chunk.offset, bytes(chunk.data)) if chunk is not None else None


# -- the shape of a frame


@pytest.mark.parametrize("message_type", STREAMED, ids=lambda kind: kind.DESCRIPTOR.name)
def test_all_streamed_messages_share_their_field_numbers(message_type: Any) -> None:
    """Field 1 opens, field 2 is a Chunk: the framing is written by hand on the strength of it."""
    descriptor = message_type.DESCRIPTOR
    assert sorted(descriptor.fields_by_number) == [1, 2]
    assert descriptor.fields_by_number[2].name == "chunk"
    assert descriptor.fields_by_number[2].message_type is tensors_pb2.Chunk.DESCRIPTOR


def test_every_tensor_stream_of_the_contract_is_covered_here() -> None:
    service = training_pb2.DESCRIPTOR.services_by_name["TrainingService"]
    sides = [(method.input_type, method.client_streaming) for method in service.methods]
    sides += [(method.output_type, method.server_streaming) for method in service.methods]
    assert {side.name for side, streamed in sides if streamed} == {kind.DESCRIPTOR.name for kind in STREAMED}


# -- agreement with protobuf


@settings(max_examples=40)
@given(messages())
def test_a_frame_means_what_protobuf_says(message: Message) -> None:
    frame = message.SerializeToString()
    assert by_us(frame, type(message)) == by_protobuf(frame, type(message))


@settings(max_examples=60)
@given(messages(), st.data())
def test_a_damaged_frame_means_what_protobuf_says(message: Message, data: st.DataObject) -> None:
    frame = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(frame)))
        how = data.draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if how == "insert":
            frame.insert(place, data.draw(st.integers(0, 255)))
        elif how == "cut":
            del frame[place:]
        elif place < len(frame):
            frame[place : place + 1] = b"" if how == "delete" else bytes([data.draw(st.integers(0, 255))])
    assert by_us(bytes(frame), type(message)) == by_protobuf(bytes(frame), type(message))


@given(st.binary(max_size=80) | st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 10, 18, 26, 128, 255])).map(bytes))
@example(b"")
@example(b"\x12\x00")  # an empty chunk
@example(b"\x12\x02\x12\x00")  # with empty data, stated
@example(b"\x12\x80\x00")  # a length longer than it need be
@example(b"\x12\x04\x08\x81\x00\x12\x00")  # not a chunk: cut off
@example(b"\x12\x05\x08\x81\x00\x12\x00")  # an offset longer than it need be
@example(b"\x12\x05\x12\x01x\x08\x07")  # data first, then offset
@example(b"\x12\x04\x12\x00\x12\x00")  # data twice
@example(b"\x12\x02\x08\x07\x12\x02\x12\x00")  # the chunk twice, to be merged
@example(b"\x0a\x00\x12\x02\x12\x00")  # a header, then a chunk
@example(b"\x12\x02\x12\x00\x0a\x00")  # a chunk, then a header
@example(b"\x0a\x00\x0a\x00\x12\x02\x12\x00")  # the header twice, to be merged
@example(b"\x12\x0c\x08" + b"\xff" * 9 + b"\x01\x12\x00")  # the largest offset
@example(b"\x12\x0c\x08" + b"\xff" * 9 + b"\x7f\x12\x00")  # an offset beyond 64 bits
def test_random_bytes_mean_what_protobuf_says(frame: bytes) -> None:
    for message_type in STREAMED:
        assert by_us(frame, message_type) == by_protobuf(frame, message_type)


@given(st.integers(0, 2**63), st.binary(max_size=500))
def test_a_frame_written_by_hand_is_what_protobuf_writes(offset: int, data: bytes) -> None:
    written = chunk_frame(offset, memoryview(data))
    chunk = training_pb2.CommitRequest.FromString(written).chunk
    assert (chunk.offset, chunk.data) == (offset, data)
    if data:
        assert written == training_pb2.CommitRequest(chunk=chunk).SerializeToString()


@pytest.mark.parametrize(
    ("frame", "kind", "said"),
    [
        (b"", training_pb2.CommitRequest, "CommitRequest is empty"),
        (b"\xff" * 7, training_pb2.PullResponse, "7 bytes is not a valid PullResponse"),
    ],
)
def test_what_is_no_message_is_refused_by_the_messages_name(frame: bytes, kind: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse_frame(frame, kind)


def test_a_received_chunk_is_a_view_of_what_arrived() -> None:
    frame = chunk_frame(8, memoryview(b"12345678"))
    opening = training_pb2.CommitRequest(header=training_pb2.CommitHeader(sequence=1)).SerializeToString()
    for whole in (frame, opening + frame):
        chunk = parse_frame(whole, training_pb2.CommitRequest).chunk
        assert chunk is not None
        assert chunk.data.obj is whole
        assert chunk.data.readonly


# -- a buffer, out and in


def view(offset: int, size: int) -> ChunkView:
    return ChunkView(offset, memoryview(b"\xff" * size))


def test_a_refused_chunk_leaves_the_place_open_for_the_right_one() -> None:
    target = np.zeros(4, "<f4")
    assembly = Assembly(target)
    assembly.add(view(0, 8))
    with pytest.raises(IncompleteTransfer):
        assembly.add(view(4, 8))
    with pytest.raises(IncompleteTransfer, match="after 8 of 16 bytes"):
        assembly.require_complete()
    assembly.add(view(8, 8))
    assembly.require_complete()


def test_the_bytes_of_an_array_are_not_copied() -> None:
    values = np.zeros(3, "<f4")
    bytes_of(values)[0:4] = np.float32(1).tobytes()
    assert values[0] == 1
