"""Commits on a lane that are cut, split, too long, for another lease, or replaced by a newer one. No θ is ever torn."""

from __future__ import annotations

import itertools
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server.intake.calls import PeerLeft
from gem_server.lane.connection import Connection
from gem_server.lane.reactor import Wait
from gem_server.telemetry.progress import Traffic
from kit.certificates import Encryption
from kit.raw_client import SMALL, CommitStream, Stream, Theta, Wire, Worker, chunk, received_bytes, theta_bits, wired
from kit.raw_lane import COMMIT, PREFIX, RawLane, committed, header, hello, message, offer, opened
from kit.server import Live, config, serving, wait_until
from kit.ways import LaneStream

P = SMALL.size
COUNTING = Hyperparameters(rule="downpour", learning_rate=1.0)  # a gradient of -1 adds 1 to every element
LARGE = Layout.of({"w": (4_000_000,)})  # more than any buffer between the two takes


@pytest.fixture
def lane(worker: Worker) -> Iterator[RawLane]:
    """The worker's lane over TCP."""
    with opened(worker) as lane:
        yield lane


def read(live: Live, lane: RawLane, *data: bytes) -> None:
    """Sends bytes, and waits until the server has read them."""
    before = received_bytes(live)
    lane.send(*data)
    wait_until(lambda: received_bytes(live) == before + sum(map(len, data)), "the server to read what was sent")


# -- messages that are right, however they arrive


def whole_commit(worker: Worker) -> bytes:
    return message(COMMIT, header(worker).SerializeToString(), 4 * P) + worker.gradient(1.0).tobytes()


def test_a_commit_may_come_byte_by_byte(live: Live, worker: Worker, lane: RawLane) -> None:
    for byte in whole_commit(worker):
        lane.send(bytes([byte]))
    assert worker.took(lane.answer())[0].version == 1


def test_a_commit_may_be_split_anywhere(live: Live, worker: Worker, lane: RawLane) -> None:
    for version, at in enumerate([1, PREFIX - 1, PREFIX, PREFIX + 1, -4 * P - 1, -4 * P, -4 * P + 2, -1], 1):
        data = whole_commit(worker)
        read(live, lane, data[:at])
        lane.send(data[at:])
        assert worker.took(lane.answer())[0].version == version


def test_commits_may_be_sent_before_the_one_before_is_answered(live: Live, worker: Worker, lane: RawLane) -> None:
    data = b""
    for sequence in (1, 2, 3):
        worker.sequence = sequence
        data += whole_commit(worker)
    lane.send(data)
    assert [lane.answer()[0].version for _ in range(3)] == [1, 2, 3]


def padded(worker: Worker, size: int) -> bytes:
    """A commit's header of exactly `size` bytes: with a field that this version does not know."""
    known = header(worker).SerializeToString()
    rest = size - len(known) - 5  # two bytes of tag, three of length
    return known + b"\xfa\x7f" + bytes([rest & 127 | 128, rest >> 7 & 127 | 128, rest >> 14]) + bytes(rest)


def test_a_header_may_have_64_kib(live: Live, worker: Worker, lane: RawLane) -> None:
    text = padded(worker, 64 << 10)
    assert len(text) == 64 << 10
    lane.send(message(COMMIT, text, 4 * P), worker.gradient(1.0).tobytes())
    assert worker.took(lane.answer())[0].version == 1


class Records:
    """A TLS socket: it hands out one record in a call, waits at None, and has ended after the last one."""

    family = socket.AF_INET

    def __init__(self, *records: bytes | None) -> None:
        self.records = list(records)

    def recv_into(self, into: memoryview) -> int:
        record = self.records.pop(0) if self.records else b""
        if record is None:
            raise ssl.SSLWantReadError
        into[: len(record)] = record
        return len(record)


def reading(*records: bytes | None) -> tuple[list[Any], bytes, int]:
    """Reads five bytes: what that waits for, what comes, and how many bytes are counted."""
    traffic, into = Traffic(), memoryview(bytearray(5))
    waits: list[Any] = []
    with suppress(PeerLeft):
        waits.extend(Connection(Records(*records), traffic, lambda: 0.0).read(into))  # type: ignore[arg-type]
        waits.append("whole")
    return waits, bytes(into), traffic.received


def test_encrypted_records_are_read_without_a_wait_between_two_that_have_come() -> None:
    assert reading(b"ab", b"cd", None, b"e", b"next") == ([Wait.READ, "whole"], b"abcde", 5)


def test_an_end_behind_a_record_is_noticed() -> None:
    assert reading(b"ab", b"cd") == ([], b"abcd\0", 4)


# -- messages that are wrong

WRONG: dict[str, tuple[str, Callable[[Worker], bytes]]] = {
    "no payload": ("INCOMPLETE_TRANSFER", lambda w: message(COMMIT, header(w).SerializeToString())),
    "an element too few": ("INCOMPLETE_TRANSFER", lambda w: sized(w, 4 * P - 4) + bytes(4 * P - 4)),
    "a byte too few": ("INCOMPLETE_TRANSFER", lambda w: sized(w, 4 * P - 1) + bytes(4 * P - 1)),
    "a byte too many": ("INCOMPLETE_TRANSFER", lambda w: sized(w, 4 * P + 1)),
    "a payload of 2**64 - 1 bytes": ("INCOMPLETE_TRANSFER", lambda w: sized(w, 2**64 - 1)),
    "float32 said to be bfloat16": (
        "INCOMPLETE_TRANSFER",
        lambda w: sized(w, 4 * P, wire_dtype=tensors_pb2.WIRE_DTYPE_BFLOAT16) + bytes(4 * P),
    ),
    "a header of 64 KiB and a byte": ("INVALID_REQUEST", lambda w: message(COMMIT, padded(w, (64 << 10) + 1))[:PREFIX]),
    "a header that is not protobuf": ("INVALID_REQUEST", lambda w: message(COMMIT, b"\xff" * 30)),
    "a second hello": ("INVALID_REQUEST", lambda w: hello(offer(w).token)),
    "a damaged prefix": ("INVALID_REQUEST", lambda w: sized(w, 4 * P)[: PREFIX - 1] + b"\0"),
    "another lease": ("PERMISSION_DENIED", lambda w: sized(w, 4 * P, lease_id="another") + bytes(4 * P)),
}


def sized(worker: Worker, payload: int, **changes: object) -> bytes:
    """A commit's message up to a payload of that size."""
    return message(COMMIT, header(worker, **changes).SerializeToString(), payload)


def test_a_wrong_message_ends_the_lane_and_moves_nothing(live: Live, worker: Worker) -> None:
    before, held = theta_bits(live), live.on_loop(lambda: live.core.memory.held)
    for what, (error, said) in WRONG.items():
        with opened(worker) as lane:
            lane.send(said(worker))
            refusal = lane.refusal()
        assert (what, refusal.error) == (what, error)
        assert refusal.details
        assert theta_bits(live) == before
    with opened(worker) as again:
        assert committed(worker, again)[0].version == 1
    assert live.on_loop(lambda: live.core.memory.held) == held
    wait_until(lambda: live.lanes == 0, "the connections to end")


@pytest.mark.parametrize("size", [0, 4 * P - 1])
@pytest.mark.parametrize("how", ["closes", "resets", "stops sending"])
def test_an_upload_that_is_cut_off_moves_nothing_and_its_sequence_stays_free(
    size: int, how: str, live: Live, worker: Worker, lane: RawLane
) -> None:
    before = theta_bits(live)
    read(live, lane, sized(worker, 4 * P), bytes(size))
    if how == "resets":
        lane.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "stops sending":
        lane.hang_up()
        assert lane.closed()
    else:
        lane.close()
    wait_until(lambda: live.lanes == 0, "the server to notice")
    assert theta_bits(live) == before
    with opened(worker) as again:
        assert committed(worker, again)[0].sequence == 1


# -- replaced by a newer call of the lease


@contextmanager
def large(folder: Path, encrypted: bool) -> Iterator[tuple[Live, Wire, ssl.SSLContext | None]]:
    """A server that counts, and what its clients need to reach it."""
    if not encrypted:
        with serving(config(COUNTING)) as live, wired(live) as wire:
            yield live, wire, None
        return
    tls = Encryption(folder)
    with serving(config(COUNTING, tls=tls.files)) as live, wired(live, credentials=tls.credentials) as wire:
        yield live, wire, tls.context


def commits(worker: Worker, way: str, context: ssl.SSLContext | None) -> CommitStream:
    return worker.wire.stream("Commit") if way == "grpc" else LaneStream(opened(worker, context), worker.size)


both_ways = pytest.mark.parametrize(
    ("older", "newer", "encrypted"),
    [*((older, newer, False) for older, newer in itertools.product(["grpc", "lane"], repeat=2)), ("lane", "lane", True)],
)


@both_ways
def test_a_commit_in_the_middle_of_its_upload_is_told_that_it_is_replaced(
    older: str, newer: str, encrypted: bool, tmp_path: Path
) -> None:
    with large(tmp_path, encrypted) as (live, wire, context):
        worker = wire.started("worker", value=0.0)
        old = commits(worker, older, context)
        before = received_bytes(live)
        old.send(worker.header(), chunk(0, bytes(20)))
        wait_until(lambda: received_bytes(live) == before + old.sent, "the upload to begin")
        new = commits(worker, newer, context)
        new.send(worker.header(), *worker.body(-1.0))
        result, theta = new.answer(P)
        old.send(chunk(20, bytes(4 * P - 20)))
        assert old.refusal().error == "SUPERSEDED"
        assert (result.version, np.unique(theta).tolist()) == (1, [1.0])
        assert theta_bits(live) == (1, theta.tobytes())
        old.cancel()
        new.cancel()


@both_ways
def test_an_answer_that_is_replaced_while_it_is_sent_is_cut_off_and_never_torn(
    older: str, newer: str, encrypted: bool, tmp_path: Path
) -> None:
    """The newer commit writes its reply to where the older one's is sent from."""
    with large(tmp_path, encrypted) as (live, wire, context):
        worker = wire.started("worker", LARGE, value=0.0)
        old = commits(worker, older, context)
        before = live.sent_bytes + 1000  # more than the result
        old.send(worker.header(), *worker.body(-1.0))
        wait_until(lambda: live.sent_bytes > before, "the answer to begin")
        worker.sequence, worker.base_version = 2, 1
        new = commits(worker, newer, context)
        new.send(worker.header(), *worker.body(-1.0))
        result, theta = new.answer(LARGE.size)
        assert (result.version, np.unique(theta).tolist()) == (2, [2.0])
        came = received(old)
        assert 0 < came.size < LARGE.size
        assert np.unique(came).tolist() == [1.0]
        old.cancel()
        new.cancel()


def received(stream: CommitStream) -> Theta:
    """All of θ that comes before the stream is cut off."""
    if isinstance(stream, Stream):
        return received_on_grpc(stream)
    assert isinstance(stream, LaneStream)
    sock, data = stream.lane.sock, bytearray()
    header_bytes = int.from_bytes(stream.lane.exactly(PREFIX)[8:12], "little")
    stream.lane.exactly(header_bytes)
    while True:
        try:
            more = sock.recv(1 << 20)
        except (ConnectionResetError, ssl.SSLError):
            more = b""
        if not more:
            return np.frombuffer(bytes(data[: len(data) // 4 * 4]), "<f4")
        data += more


def received_on_grpc(stream: Stream) -> Theta:
    data = b""
    try:
        while True:
            data += pb.CommitResponse.FromString(stream.read()).chunk.data
    except grpc.RpcError:
        return np.frombuffer(data, "<f4")
