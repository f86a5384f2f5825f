"""Every failure of the contract, provoked through a real channel.

Each is typed on the wire as errors.proto says, leaves θ bit-identical, and leaves the server serving.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gem_api.v1 import admin_pb2
from gem_api.v1 import errors_pb2 as errors
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import (
    CHUNK,
    SMALL,
    Refusal,
    Wire,
    Worker,
    chunk,
    chunks,
    initialize_header,
    register_request,
    theta_bits,
    wired,
)
from kit.server import Live, config, serving, wait_until
from kit.ways import FAILED, all_ways, read_by_the_server, refusal_of, through_sockets

# errors.proto, in the words of the contract.
STATUSES = {
    "LEASE_ENDED": grpc.StatusCode.FAILED_PRECONDITION,
    "LAYOUT_MISMATCH": grpc.StatusCode.INVALID_ARGUMENT,
    "INCOMPLETE_TRANSFER": grpc.StatusCode.INVALID_ARGUMENT,
    "NON_FINITE_GRADIENT": grpc.StatusCode.INVALID_ARGUMENT,
    "SEQUENCE_GAP": grpc.StatusCode.FAILED_PRECONDITION,
    "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "SETTINGS_DIFFER": grpc.StatusCode.FAILED_PRECONDITION,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "NOT_INITIALIZED": grpc.StatusCode.FAILED_PRECONDITION,
    "SUPERSEDED": grpc.StatusCode.ABORTED,
    "CHECKPOINT_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
    "NORM_OUT_OF_BOUNDS": grpc.StatusCode.INVALID_ARGUMENT,
    "QUARANTINED": grpc.StatusCode.PERMISSION_DENIED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "RULE_FAILED": grpc.StatusCode.INVALID_ARGUMENT,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
}
P = SMALL.size
Frames = Callable[[Worker], Sequence[bytes]]


def assert_refused(refusal: Refusal, error: str, reason: str = "") -> None:
    """A call has the status of the error; a lane has none."""
    assert (refusal.error, refusal.reason) == (error, reason), refusal
    assert refusal.status in (None, STATUSES[error]), refusal
    assert refusal.details


@pytest.fixture
def unharmed(live: Live, wire: Wire, worker: Worker) -> Iterator[None]:
    """θ is bit-identical after the test, and an honest commit still works."""
    before = theta_bits(live)
    yield
    assert theta_bits(live) == before
    honest = wire.join("honest")
    honest.pull()
    assert honest.commit()[0].version == before[0] + 1


def test_the_table_here_names_every_code_of_the_contract() -> None:
    codes = {name.removeprefix("ERROR_CODE_") for name, number in errors.ErrorCode.items() if number}
    assert codes == STATUSES.keys()


# -- what a commit can do wrong: one stream, half-closed after these frames


def poisoned(value: float, at: int = P - 1) -> Frames:
    def frames(worker: Worker) -> list[bytes]:
        gradient = worker.gradient()
        gradient[at] = value
        return [worker.header(), *chunks(gradient)]

    return frames


def body_of(size: int) -> Frames:
    return lambda worker: [worker.header(), *chunks(np.ones(size, np.float32))]


def after_header(*frames: bytes) -> Frames:
    return lambda worker: [worker.header(), *frames]


def with_header(**changes: object) -> Frames:
    return lambda worker: [worker.header(**changes), *worker.body()]


WRONG_COMMITS: dict[str, tuple[str, Frames]] = {
    "a NaN": ("NON_FINITE_GRADIENT", poisoned(np.nan)),
    "a NaN in front": ("NON_FINITE_GRADIENT", poisoned(np.nan, at=0)),
    "an infinity": ("NON_FINITE_GRADIENT", poisoned(np.inf)),
    "a negative infinity": ("NON_FINITE_GRADIENT", poisoned(-np.inf)),
    "a value that could overflow": ("NON_FINITE_GRADIENT", poisoned(2e30)),
    "a base version from the future": ("INVALID_REQUEST", with_header(base_version=1)),
    "another layout's fingerprint": ("LAYOUT_MISMATCH", with_header(layout_fingerprint=bytes(32))),
    "no fingerprint": ("LAYOUT_MISMATCH", with_header(layout_fingerprint=b"")),
    "a gap in the sequence": ("SEQUENCE_GAP", with_header(sequence=2)),
    "sequence zero": ("SEQUENCE_GAP", with_header(sequence=0)),
    "the largest sequence": ("SEQUENCE_GAP", with_header(sequence=2**64 - 1)),
}
WRONG_FRAMES: dict[str, tuple[str, Frames]] = {
    "too few parameters": ("INCOMPLETE_TRANSFER", body_of(P - 1)),
    "too many parameters": ("INCOMPLETE_TRANSFER", body_of(P + 1)),
    "no body at all": ("INCOMPLETE_TRANSFER", after_header()),
    "half-close in mid-body": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(8)))),
    "a second header in mid-body": ("INCOMPLETE_TRANSFER", lambda w: [w.header(), chunk(0, bytes(8)), w.header()]),
    "a second header before the body": ("INCOMPLETE_TRANSFER", lambda w: [w.header(), w.header(), *w.body()]),
    "a chunk before any header": ("INCOMPLETE_TRANSFER", lambda w: w.body()),
    "chunks that overlap": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(8)), chunk(4, bytes(4 * P - 4)))),
    "the same chunk twice": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(8)), chunk(0, bytes(8)))),
    "chunks that leave a hole": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(8)), chunk(12, bytes(4 * P - 12)))),
    "the second chunk first": ("INCOMPLETE_TRANSFER", after_header(chunk(8, bytes(4 * P - 8)), chunk(0, bytes(8)))),
    "an offset beyond 32 bits": ("INCOMPLETE_TRANSFER", after_header(chunk(2**32, bytes(4 * P)))),
    "an offset beyond 63 bits": ("INCOMPLETE_TRANSFER", after_header(chunk(2**64 - 4, bytes(4)))),
    "an empty chunk": ("INCOMPLETE_TRANSFER", after_header(chunk(0, b""))),
    "an empty chunk in the middle": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(8)), chunk(8, b""))),
    "a chunk that cuts an element": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(6)))),
    "a chunk that is too large": ("INCOMPLETE_TRANSFER", after_header(chunk(0, bytes(CHUNK + 4)))),
    "an empty frame": ("INVALID_REQUEST", lambda w: [b""]),
    "an empty frame in mid-body": ("INVALID_REQUEST", after_header(chunk(0, bytes(8)), b"")),
    "a frame that does not parse": ("INVALID_REQUEST", lambda w: [b"\xff\xff\xff"]),
    "a chunk frame that is cut off": ("INVALID_REQUEST", after_header(chunk(0, bytes(4 * P))[:-3])),
}


@all_ways
@pytest.mark.parametrize("what", WRONG_COMMITS)
@pytest.mark.usefixtures("unharmed")
def test_a_wrong_commit_is_refused(what: str, worker: Worker) -> None:
    error, frames = WRONG_COMMITS[what]
    assert_refused(worker.whole(*frames(worker)).refusal(), error)


@through_sockets
@pytest.mark.parametrize("dtype", [0, 99], ids=["none", "unknown"])
@pytest.mark.usefixtures("unharmed")
def test_a_wrong_wire_dtype_is_refused(dtype: int, worker: Worker) -> None:
    assert_refused(worker.whole(worker.header(wire_dtype=dtype), *worker.body()).refusal(), "INVALID_REQUEST")


@pytest.mark.usefixtures("unharmed")
def test_wrong_frames_are_refused(wire: Wire, worker: Worker) -> None:
    for error, frames in WRONG_FRAMES.values():
        assert_refused(wire.whole("Commit", *frames(worker)).refusal(), error)


@all_ways
def test_a_refused_commit_counts_as_rejected_and_its_sequence_stays_free(wire: Wire, worker: Worker) -> None:
    worker.whole(*poisoned(np.nan)(worker)).refusal()
    assert worker.commit()[0].sequence == 1
    assert dict(wire.status().commits) == {"applied": 1, "repeated": 0, "rejected": 1, "discarded": 0}


def test_a_chunk_too_many_is_refused_and_the_commit_before_it_stands(wire: Wire, worker: Worker) -> None:
    stream = wire.whole("Commit", worker.header(), *worker.body(), chunk(4 * P, bytes(4)))
    assert worker.took(stream.answer(P))[0].version == 1
    assert_refused(stream.refusal(), "INCOMPLETE_TRANSFER")
    assert worker.commit()[0].version == 2


def test_a_wrong_repeat_is_refused_too(live: Live, wire: Wire, worker: Worker) -> None:
    """A repeat is sent whole: its body is dropped, but it must be one."""
    worker.commit()
    before = theta_bits(live)
    bodies = {"none": [], "short": [chunk(0, bytes(8))], "empty chunk": [chunk(0, b"")], "header": [worker.header()]}
    for what, body in bodies.items():
        refusal = wire.whole("Commit", worker.header(sequence=1, base_version=0), *body).refusal()
        assert_refused(refusal, "INCOMPLETE_TRANSFER")
        assert theta_bits(live) == before, what
    assert worker.commit()[0].version == 2


# -- leases

LEASE_CALLS: dict[str, Any] = {
    "Pull": pb.PullRequest(), "InitializeCentral": pb.InitializeCentralRequest(header=pb.InitializeCentralHeader()),
    "Commit": pb.CommitRequest(header=pb.CommitHeader()), "OpenLane": pb.OpenLaneRequest(),
    "RenewLease": pb.RenewLeaseRequest(), "LeaveCluster": pb.LeaveClusterRequest(),
    "LeaseShard": pb.LeaseShardRequest(sample_count=9), "CompleteShard": pb.CompleteShardRequest(shard_id=1),
}  # fmt: skip


@pytest.mark.usefixtures("unharmed")
def test_a_lease_that_is_not_live_is_refused_with_the_reason(wire: Wire) -> None:
    gone = wire.join("gone")
    gone.leave()
    for rpc, request in LEASE_CALLS.items():
        lease = request.header if hasattr(request, "header") else request
        for lease.lease_id, reason in ((gone.lease_id, "left"), ("no such lease", "unknown")):
            assert_refused(wire.refusal(rpc, request), "LEASE_ENDED", reason)


@through_sockets
@pytest.mark.usefixtures("unharmed")
def test_a_newer_call_under_the_same_lease_supersedes_the_older_one(live: Live, wire: Wire) -> None:
    other = wire.join("other")
    stalled = read_by_the_server(live, other, other.header(), chunk(0, bytes(8)))
    other.pull()
    assert_refused(stalled.refusal(), "SUPERSEDED")


# -- registration

WRONG_REGISTRATIONS: dict[str, tuple[str, pb.RegisterWorkerRequest]] = {
    "no name": ("INVALID_REQUEST", register_request("", [("w", (17,))], 0, 17)),
    "a name of 129 characters": ("INVALID_REQUEST", register_request("n" * 129, [("w", (17,))], 0, 17)),
    "a name with a line break": ("INVALID_REQUEST", register_request("a\nb", [("w", (17,))], 0, 17)),
    "a name with a NUL": ("INVALID_REQUEST", register_request("a\0b", [("w", (17,))], 0, 17)),
    "no layout": ("INVALID_REQUEST", pb.RegisterWorkerRequest(worker_name="x")),
    "no tensors": ("INVALID_REQUEST", register_request("x", [], 0, 0)),
    "no parameters": ("INVALID_REQUEST", register_request("x", [("w", (0,))], 0, 0)),
    "a range that begins late": ("INVALID_REQUEST", register_request("x", [("w", (17,))], 1, 17)),
    "a range that ends late": ("INVALID_REQUEST", register_request("x", [("w", (17,))], 0, 18)),
    "a tensor name twice": ("INVALID_REQUEST", register_request("x", [("w", (8,)), ("w", (9,))], 0, 17)),
    "an unprintable tensor name": ("INVALID_REQUEST", register_request("x", [("w\x1b", (17,))], 0, 17)),
    "a tensor name of 100,000 unprintable characters": (
        "INVALID_REQUEST",
        register_request("x", [("\x1b" * 100_000, (17,))], 0, 17),
    ),
    "too many parameters": ("INVALID_REQUEST", register_request("x", [("w", (2**41,))], 0, 2**41)),
    "a size of 5,780 digits": ("INVALID_REQUEST", register_request("x", [("w", (2**64 - 1,) * 300)], 0, 17)),
    "a size that is 0 in 64 bits": ("INVALID_REQUEST", register_request("x", [("w", (2**32, 2**32))], 0, 0)),
    "the largest extent": ("INVALID_REQUEST", register_request("x", [("w", (2**64 - 1,))], 0, 2**64 - 1)),
    "a huge extent of nothing": ("INVALID_REQUEST", register_request("x", [("w", (17, 2**64 - 1, 0))], 0, 17)),
    "another name": ("LAYOUT_MISMATCH", register_request("x", [("v", (3, 5)), ("b", (2,))], 0, 17)),
    "a tensor more": ("LAYOUT_MISMATCH", register_request("x", [("w", (3, 5)), ("b", (2,)), ("c", (1,))], 0, 18)),
    "a name of 100,000 characters": ("INVALID_REQUEST", register_request("x", [("v" * 100_000, (17,))], 0, 17)),
}


@pytest.mark.usefixtures("unharmed")
def test_a_wrong_registration_is_refused(live: Live, wire: Wire) -> None:
    before = live.on_loop(lambda: live.core.memory.held)
    for error, request in WRONG_REGISTRATIONS.values():
        assert_refused(wire.refusal("RegisterWorker", request), error)
    assert live.on_loop(lambda: live.core.memory.held) == before


# -- the first value


@pytest.mark.parametrize(
    ("error", "frames"),
    [
        ("INCOMPLETE_TRANSFER", [chunk(0, bytes(4 * P - 4), pb.InitializeCentralRequest)]),
        ("INCOMPLETE_TRANSFER", [chunk(0, bytes(4 * P + 4), pb.InitializeCentralRequest)]),
        ("INCOMPLETE_TRANSFER", [chunk(0, bytes(4 * P), pb.InitializeCentralRequest), chunk(4 * P, bytes(4))]),
        ("NON_FINITE_GRADIENT", chunks(np.full(P, np.nan, np.float32), pb.InitializeCentralRequest)),
        ("INVALID_REQUEST", [b""]),
    ],
    ids=["too short", "too long", "a chunk too many", "NaN", "an empty frame"],
)
def test_a_wrong_first_value_is_refused(error: str, frames: list[bytes], live: Live, wire: Wire) -> None:
    worker = wire.join("first")
    refusal = wire.whole("InitializeCentral", initialize_header(worker.lease_id), *frames).refusal()
    assert_refused(refusal, error)
    assert not live.on_loop(lambda: live.core.central.initialized)
    worker.initialize(np.ones(P, np.float32))
    worker.pull()
    assert worker.commit()[0].version == 1


@pytest.mark.parametrize("frames", [[], [chunk(0, bytes(4 * P), pb.InitializeCentralRequest)]], ids=["nothing", "a chunk"])
def test_a_first_value_needs_its_header(frames: list[bytes], wire: Wire) -> None:
    wire.join("first")
    assert_refused(wire.whole("InitializeCentral", *frames).refusal(), "INCOMPLETE_TRANSFER")


@pytest.mark.usefixtures("unharmed")
def test_only_the_worker_that_was_asked_gives_the_first_value(wire: Wire, worker: Worker) -> None:
    frames = [initialize_header(worker.lease_id), *chunks(np.zeros(P, np.float32), pb.InitializeCentralRequest)]
    assert_refused(wire.whole("InitializeCentral", *frames).refusal(), "INVALID_REQUEST")


@all_ways
def test_before_the_first_value_there_is_nothing_to_pull_or_commit_to(wire: Wire) -> None:
    worker = wire.join("early")
    assert_refused(wire.refusal("Pull", pb.PullRequest()), "NOT_INITIALIZED")
    assert_refused(worker.whole(worker.header(), *worker.body()).refusal(), "NOT_INITIALIZED")
    worker.initialize(np.ones(P, np.float32))
    worker.pull()
    assert worker.commit()[0].version == 1


# -- the other calls


@pytest.mark.parametrize("accuracy", [-0.1, 1.1, float("nan"), float("inf")])
@pytest.mark.usefixtures("unharmed")
def test_an_impossible_accuracy_is_refused(accuracy: float, wire: Wire) -> None:
    request = pb.ReportEvaluationRequest(version=0, loss=1.0, accuracy=accuracy)
    assert_refused(wire.refusal("ReportEvaluation", request), "INVALID_REQUEST")


@pytest.mark.usefixtures("unharmed")
def test_another_data_set_is_refused(wire: Wire, worker: Worker) -> None:
    refusal = wire.refusal("LeaseShard", pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=0))
    assert_refused(refusal, "INVALID_REQUEST")
    wire.call("LeaseShard", pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=100))
    refusal = wire.refusal("LeaseShard", pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=101))
    assert_refused(refusal, "INVALID_REQUEST")


@all_ways
def test_sample_counts_of_any_size_leave_the_status_readable(wire: Wire, worker: Worker) -> None:
    for _ in range(2):
        stream = worker.whole(worker.header(sample_count=2**64 - 1), *worker.body())
        try:
            worker.took(stream.answer(P))
        except FAILED as error:
            assert_refused(refusal_of(error), "INVALID_REQUEST")
    assert wire.status().state == pb.RUN_STATE_TRAINING


def test_a_checkpoint_without_a_folder_fails(wire: Wire, worker: Worker) -> None:
    assert_refused(wire.refusal("CreateCheckpoint", admin_pb2.CreateCheckpointRequest()), "CHECKPOINT_FAILED")
    assert worker.commit()[0].version == 1


def test_a_checkpoint_of_nothing_and_one_that_cannot_be_written_fail(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with serving(config(checkpoint_dir=folder)) as live, wired(live) as wire:
        request = admin_pb2.CreateCheckpointRequest()
        assert_refused(wire.refusal("CreateCheckpoint", request), "CHECKPOINT_FAILED")
        worker = wire.started("worker")
        shutil.rmtree(folder)
        folder.write_text("a file is in the way")
        before = theta_bits(live)
        assert_refused(wire.refusal("CreateCheckpoint", request), "CHECKPOINT_FAILED")
        assert theta_bits(live) == before
        assert worker.commit()[0].version == 1
        folder.unlink()
        assert wire.call("CreateCheckpoint", request).version == 1


# -- memory

EACH = 3 * 4 * P  # the proxy's moment, the snapshot and the gradient that arrives


def test_a_copy_that_memory_has_no_room_for_is_refused() -> None:
    with serving(config(memory_limit=4 * P + EACH)) as live, wired(live) as wire:
        worker = wire.started("worker")
        assert_refused(wire.refusal("Pull", pb.PullRequest()), "OVERLOADED")
        assert worker.commit()[0].version == 1


def test_a_pull_without_a_lease_holds_memory_only_while_it_lasts(live: Live, wire: Wire, worker: Worker) -> None:
    before = live.on_loop(lambda: live.core.memory.held)
    wire.pull(P)
    wait_until(lambda: live.on_loop(lambda: live.core.memory.held) == before, "the reader's copy to be freed", 5.0)
    assert worker.commit()[0].version == 1


def test_a_model_that_no_machine_can_hold_is_refused_and_leaves_no_trace(live: Live, wire: Wire) -> None:
    huge = 2**40
    assert_refused(wire.refusal("RegisterWorker", register_request("huge", [("w", (huge,))], 0, huge)), "OVERLOADED")
    assert wire.started("worker").commit()[0].version == 1
