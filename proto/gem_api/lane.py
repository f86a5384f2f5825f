"""The lane's messages: a prefix of 24 bytes, a protobuf header, and a payload. docs/lane.md describes every byte.

The prefix, little-endian:
    magic            4 bytes, "GEML"
    version          1 byte
    kind             1 byte: see `Kind`
    reserved         2 bytes, 0
    header bytes     4 bytes
    payload bytes    8 bytes
    checksum         4 bytes: CRC-32 of the 20 bytes before it
"""

from __future__ import annotations

import socket
import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from gem_api.errors import GemError, InvalidRequest, from_code
from gem_api.v1 import lane_pb2 as pb

MAGIC = b"GEML"
VERSION = 1
MAX_HEADER_BYTES = 64 << 10
# Silence is probed every second, so that the other end hears from a peer that is well. After 15 s it ends the connection; so
# does data that nobody acknowledges, or that the peer does not read: a gradient may wait for its turn.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 14, "TCP_USER_TIMEOUT": 15_000}
_FIELDS = struct.Struct("<4sBBHIQ")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _FIELDS.size + _CHECKSUM.size


class Kind(IntEnum):
    """The kinds of messages; a message's header is the protobuf message in brackets."""

    HELLO = 1  # LaneHello, from the client
    WELCOME = 2  # LaneWelcome
    COMMIT = 3  # CommitHeader, from the client; the payload is the gradient
    RESULT = 4  # CommitResult; the payload is θ
    ERROR = 5  # LaneError; the server then closes the connection
    RENEW = 6  # LaneRenewal, from the client between two commits; nothing comes back


class Prefix(NamedTuple):
    """The first bytes of a message, decoded."""

    kind: Kind
    header: int
    payload: int


def tune(sock: socket.socket) -> None:
    """Sets a TCP socket up for the lane: messages leave at once, and a peer that has vanished is noticed within seconds."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def opening(kind: Kind, header: Message, payload: int = 0) -> bytes:
    """A message without its payload, which has `payload` bytes."""
    body = header.SerializeToString()
    fields = _FIELDS.pack(MAGIC, VERSION, kind, 0, len(body), payload)
    return b"".join((fields, _CHECKSUM.pack(zlib.crc32(fields)), body))


def parse_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    """Decodes PREFIX_BYTES bytes. Raises InvalidRequest if they are not the prefix of a message."""
    fields = data[: _FIELDS.size]
    magic, version, kind, _, header, payload = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise InvalidRequest("these bytes are not a message of the lane: it carries commits alone, and gRPC has another port")
    if zlib.crc32(fields) != _CHECKSUM.unpack(data[_FIELDS.size :])[0]:
        raise InvalidRequest("a message's prefix was damaged on its way")
    if version != VERSION:
        raise InvalidRequest(f"the message has version {version} of the lane's format; this side has version {VERSION}")
    try:
        known = Kind(kind)
    except ValueError:
        raise InvalidRequest(f"a message of unknown kind {kind}") from None
    if header > MAX_HEADER_BYTES:
        raise InvalidRequest(f"a header of {header} bytes: at most {MAX_HEADER_BYTES} are allowed")
    return Prefix(known, header, payload)


def parse_header(data: bytes | bytearray | memoryview, message_type: Any) -> Any:
    """Decodes a header. Raises InvalidRequest."""
    try:
        return message_type.FromString(bytes(data))
    except DecodeError as error:
        name = message_type.DESCRIPTOR.name
        raise InvalidRequest(f"a header of {len(data)} bytes is not a valid {name}: {error}") from None


def error_message(error: GemError) -> pb.LaneError:
    """The last message of a lane that fails with this error."""
    return pb.LaneError(code=error.code, message=str(error), lease_end_reason=getattr(error, "reason", ""))


def error_of(message: pb.LaneError) -> GemError:
    """The typed error in the server's last message."""
    return from_code(message.code, message.message, message.lease_end_reason)
