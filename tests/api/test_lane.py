"""The framing of the lane's messages: what is written is read back, and whatever is no message is refused with one line."""

from __future__ import annotations

import socket
import struct
import zlib

import pytest
from gem_api import lane
from gem_api.errors import Draining, GemError, InvalidRequest, LeaseEnded, Overloaded, Superseded
from gem_api.framing import varint
from gem_api.lane import MAGIC, MAX_HEADER_BYTES, PREFIX_BYTES, VERSION, Kind, error_message, error_of, opening
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

UINT64 = st.integers(0, 2**64 - 1)


def prefix(
    magic: bytes = MAGIC, version: int = VERSION, kind: int = 3, reserved: int = 0, header: int = 0, payload: int = 0
) -> bytes:
    """A prefix with a right checksum, written from docs/lane.md."""
    fields = struct.pack("<4sBBHIQ", magic, version, kind, reserved, header, payload)
    return fields + struct.pack("<I", zlib.crc32(fields))


# -- there and back


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("payload", [0, 1, 2**32, 2**64 - 1])
def test_a_prefix_is_written_as_the_contract_says(kind: Kind, payload: int) -> None:
    header = lane_pb2.LaneHello(token=b"0123456789abcdef")
    body = header.SerializeToString()
    assert opening(kind, header, payload) == prefix(kind=kind, header=len(body), payload=payload) + body


def test_any_kind_of_memory_is_read_and_a_reserved_field_is_for_later_versions() -> None:
    data = prefix(header=MAX_HEADER_BYTES, payload=9, reserved=77)
    for seen in (data, bytearray(data), memoryview(data), memoryview(bytearray(data))):
        assert lane.parse_prefix(seen) == (Kind.COMMIT, MAX_HEADER_BYTES, 9)


# -- what is no message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (prefix(magic=b"GEMX"), "not a message of the lane"),
        (b"GET / HTTP/1.1\r\nHost: h\r", "not a message of the lane"),
        (bytes(PREFIX_BYTES), "not a message of the lane"),
        (prefix(version=2), "version 2 .* this side has version 1"),
        (prefix(kind=7), "unknown kind 7"),
        (prefix(header=MAX_HEADER_BYTES + 1), "header of 65537 bytes: at most 65536"),
    ],
)
def test_what_is_no_prefix_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        lane.parse_prefix(data)
    assert "\n" not in str(raised.value)


def test_a_prefix_with_any_bit_wrong_is_refused() -> None:
    for bit in range(8 * PREFIX_BYTES):
        data = bytearray(prefix(header=100, payload=10**9))
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidRequest):
            lane.parse_prefix(data)


@given(st.binary(max_size=20), UINT64, st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_a_right_checksum_is_read_or_refused(magic: bytes, payload: int, version: int, kind: int, header: int) -> None:
    data = prefix((MAGIC + magic)[:4] if magic else MAGIC, version, kind, 0, header, payload)
    legal = version == VERSION and kind in set(map(int, Kind)) and header <= MAX_HEADER_BYTES
    try:
        assert lane.parse_prefix(data) == (kind, header, payload)
        assert legal
    except InvalidRequest:
        assert not legal


@given(st.binary(max_size=200))
def test_a_header_means_what_protobuf_says(data: bytes) -> None:
    for message_type in (lane_pb2.LaneHello, lane_pb2.LaneError, pb.CommitHeader, pb.CommitResult):
        try:
            expected = message_type.FromString(data).SerializeToString(deterministic=True)
        except Exception:
            with pytest.raises(InvalidRequest, match=message_type.DESCRIPTOR.name):
                lane.parse_header(data, message_type)
        else:
            assert lane.parse_header(data, message_type).SerializeToString(deterministic=True) == expected


# -- errors


@pytest.mark.parametrize(
    "error", [InvalidRequest("no"), Overloaded("later"), Draining("gone"), Superseded("newer"), LeaseEnded("over", "expired")]
)
def test_an_error_is_the_same_on_the_other_side(error: GemError) -> None:
    again = error_of(lane_pb2.LaneError.FromString(error_message(error).SerializeToString()))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert getattr(again, "reason", None) == getattr(error, "reason", None)


@given(st.integers(-(2**31), 2**31 - 1), st.text(max_size=20), st.text(max_size=20))
def test_an_error_of_a_later_version_is_an_error_too(code: int, text: str, reason: str) -> None:
    message = lane_pb2.LaneError(message=text, lease_end_reason=reason)
    data = message.SerializeToString() + b"\x08" + varint(code % 2**64)
    assert isinstance(error_of(lane_pb2.LaneError.FromString(data)), Exception)


# -- the socket


def test_a_tcp_socket_sends_at_once_and_notices_a_peer_that_vanished() -> None:
    with socket.socket() as sock:
        lane.tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_unix_socket_is_left_as_it_is() -> None:
    first, second = socket.socketpair()
    with first, second:
        lane.tune(first)
