"""A server that requires tokens: who may make which calls, and to whom a lease belongs. All calls are real, from dishonest
clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from gem_api.v1 import admin_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server.security.tls import TlsFiles
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit.certificates import Authority
from kit.raw_client import (
    RPCS,
    SMALL,
    Metadata,
    Refusal,
    Stream,
    Wire,
    Worker,
    chunks,
    initialize_header,
    received_bytes,
    register_request,
    theta_bits,
    wired,
)
from kit.raw_lane import COMMIT, RawLane, committed, header, hello, message, offer, opened, opened_in_memory, tcp, unix
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving, wait_until
from kit.tokens import ADMIN, ALICE, ANY, BOB, EVALUATOR, LINES, bearing, write_tokens

DENIED = ("PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED)
UNKNOWN = ("UNAUTHENTICATED", grpc.StatusCode.UNAUTHENTICATED)
# What each role may call, in the words of docs/security.md.
TRAINS = {
    "RegisterWorker", "InitializeCentral", "OpenLane", "Commit", "RenewLease", "LeaveCluster", "LeaseShard", "CompleteShard",
    "ReportEvaluation",
}  # fmt: skip
MAY = {
    ANY: TRAINS | {"Pull", "GetStatus"},
    EVALUATOR: {"Pull", "GetStatus", "ReportEvaluation"},
    ADMIN: set(RPCS),
}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", *LINES)


@pytest.fixture
def live(tokens: Path) -> Iterator[Live]:
    """A server that asks for tokens."""
    with serving(config(tokens=tokens, memory_socket=abstract())) as server:
        yield server


@contextmanager
def with_token(live: Live, token: str) -> Iterator[Wire]:
    with wired(live, bearing(token)) as wire:
        yield wire


@pytest.fixture
def alice(live: Live) -> Iterator[Worker]:
    """A worker that has initialised θ under a token of its own."""
    with with_token(live, ALICE) as wire:
        yield wire.started("alice")


def assert_refused(refusal: Refusal, how: tuple[str, grpc.StatusCode]) -> None:
    assert (refusal.error, refusal.status) == how, refusal
    assert refusal.details
    assert not [token for token in (ALICE, BOB, ANY, EVALUATOR, ADMIN) if token in refusal.details]


# -- without a token, or with a wrong one


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearing("wrong-0123456789abcdef"),
        bearing(""),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("token", ALICE),),
    ],
    ids=["none", "wrong", "empty", "no scheme", "another scheme", "another key"],
)
def test_no_call_is_answered_without_a_token_that_is_known(metadata: Metadata, live: Live) -> None:
    with wired(live, metadata) as wire:
        for rpc in RPCS:
            assert_refused(wire.whole(rpc, b"").refusal(), UNKNOWN)


def test_health_checks_are_open_and_reflection_is_off(live: Live) -> None:
    with grpc.insecure_channel(live.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request])))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


# -- roles


def error_of(stream: Stream) -> str:
    """The error that a call ends with; empty where it ends well."""
    try:
        while True:
            stream.read()
    except StopIteration:
        return ""
    except grpc.RpcError as error:
        return Refusal.of(error).error


@pytest.mark.parametrize("token", MAY, ids=["worker", "evaluator", "admin"])
def test_a_role_may_make_its_own_calls_and_no_others(token: str, live: Live) -> None:
    with with_token(live, token) as wire:
        calls = sorted(set(RPCS) - {"Drain"})  # an admin's drain would be obeyed: see below
        errors = {rpc: error_of(wire.whole(rpc, b"")) for rpc in calls}
    assert "UNAUTHENTICATED" not in errors.values()
    assert {rpc for rpc in calls if errors[rpc] != "PERMISSION_DENIED"} == MAY[token] - {"Drain"}


@pytest.mark.parametrize("token", [ALICE, ANY, EVALUATOR], ids=["worker", "any worker", "evaluator"])
def test_only_an_admin_drains(token: str, live: Live) -> None:
    with with_token(live, token) as wire:
        assert_refused(wire.refusal("Drain", admin_pb2.DrainRequest()), DENIED)
        assert wire.status().state == pb.RUN_STATE_WAITING
    with with_token(live, ADMIN) as admin:
        admin.call("Drain", admin_pb2.DrainRequest())
    live.stop()


# -- names


def test_a_token_with_a_name_registers_under_that_name_alone(live: Live) -> None:
    with with_token(live, BOB) as bob:
        assert_refused(bob.refusal("RegisterWorker", register_request("alice", [("w", (17,))], 0, 17)), DENIED)
        assert bob.join("bob").lease_id


@pytest.mark.parametrize("token", [ANY, ADMIN], ids=["worker", "admin"])
def test_nobody_takes_the_name_of_a_worker_in_the_run(token: str, live: Live, alice: Worker) -> None:
    """Registering under it would end the worker's lease."""
    with with_token(live, token) as wire:
        request = pb.RegisterWorkerRequest(worker_name="alice", layout=SMALL.to_message())
        assert_refused(wire.refusal("RegisterWorker", request), DENIED)
    assert alice.commit()[0].version == 1


def test_a_worker_comes_back_under_its_own_name(live: Live, alice: Worker) -> None:
    again = alice.wire.join("alice")
    again.pull()
    assert again.commit()[0].version == 1


# -- whose a lease is


def calls_under(lease_of: Worker) -> dict[str, list[bytes]]:
    """Every call that names a lease, well-formed."""
    lease = lease_of.lease_id
    messages = {
        "Pull": pb.PullRequest(lease_id=lease),
        "OpenLane": pb.OpenLaneRequest(lease_id=lease),
        "RenewLease": pb.RenewLeaseRequest(lease_id=lease),
        "LeaveCluster": pb.LeaveClusterRequest(lease_id=lease),
        "LeaseShard": pb.LeaseShardRequest(lease_id=lease, sample_count=10),
        "CompleteShard": pb.CompleteShardRequest(lease_id=lease, shard_id=0),
    }
    values = np.zeros(SMALL.size, np.float32)
    return {
        **{rpc: [message.SerializeToString()] for rpc, message in messages.items()},
        "Commit": [lease_of.header(), *lease_of.body()],
        "InitializeCentral": [initialize_header(lease), *chunks(values, pb.InitializeCentralRequest)],
    }


def test_every_call_that_names_a_lease_is_tried_here(alice: Worker) -> None:
    """A new call that names one, in itself or in the header of its stream, must be added to `calls_under`."""
    named = {
        name for name, rpc in RPCS.items()
        if "lease_id" in rpc.input_type.fields_by_name
        or ("header" in rpc.input_type.fields_by_name
            and "lease_id" in rpc.input_type.fields_by_name["header"].message_type.fields_by_name)
    }  # fmt: skip
    assert named == calls_under(alice).keys()


@pytest.mark.parametrize("token", [BOB, ANY, ADMIN], ids=["bob", "any worker", "admin"])
def test_no_call_is_answered_under_anothers_lease(token: str, live: Live, alice: Worker) -> None:
    before = theta_bits(live)
    with with_token(live, token) as thief:
        for rpc, frames in calls_under(alice).items():
            assert_refused(thief.whole(rpc, *frames).refusal(), DENIED)
    assert theta_bits(live) == before
    assert live.on_loop(lambda: live.core.leases.live[alice.lease_id].worker) == "alice"
    assert alice.commit()[0].version == 1


def test_a_second_commit_on_ones_own_stream_can_not_name_anothers_lease(live: Live, alice: Worker) -> None:
    with with_token(live, BOB) as wire:
        bob = wire.join("bob")
        bob.pull()
        stream = wire.stream("Commit")
        assert bob.commit_on(stream)[0].version == 1
        before = theta_bits(live)
        stream.send(alice.header(), *alice.body())
        assert_refused(stream.refusal(), DENIED)
        assert theta_bits(live) == before


def test_a_thief_does_not_break_off_the_owners_call(live: Live, alice: Worker) -> None:
    """A newer call under a lease ends an older one's exchange: not one that has no right to the lease."""
    before, opening = received_bytes(live), alice.header()
    stream = alice.wire.stream("Commit", opening)
    wait_until(lambda: received_bytes(live) == before + len(opening), "the server to read the owner's header")
    with with_token(live, BOB) as thief:
        assert_refused(thief.whole("Commit", alice.header(), *alice.body()).refusal(), DENIED)
    stream.send(*alice.body())
    assert alice.took(stream.answer(SMALL.size))[0].version == 1


LANES = pytest.mark.parametrize("lane", [opened, pytest.param(opened_in_memory, marks=linux_only)], ids=["tcp", "memory"])
Opening = Callable[[Worker], RawLane]


def commit_message(worker: Worker, lane: RawLane) -> bytes:
    """The worker's next commit, as it goes over this lane."""
    payload = b"" if lane.gradient is not None else worker.gradient(1.0).tobytes()
    return message(COMMIT, header(worker).SerializeToString(), len(payload)) + payload


@LANES
def test_a_lane_carries_the_commits_of_the_lease_that_asked_for_it_and_no_others(
    lane: Opening, live: Live, alice: Worker
) -> None:
    with with_token(live, BOB) as wire:
        bob = wire.join("bob")
        bob.pull()
        before = theta_bits(live)
        with lane(bob) as of_bob:
            of_bob.send(commit_message(alice, of_bob))
            assert of_bob.refusal().error == "PERMISSION_DENIED"
        assert theta_bits(live) == before
        with lane(bob) as of_bob:
            assert committed(bob, of_bob)[0].version == 1
    with lane(alice) as of_alice:
        assert committed(alice, of_alice)[0].version == 2


@LANES
def test_a_withdrawn_token_ends_an_open_lane_at_its_next_commit(lane: Opening, live: Live, alice: Worker, tokens: Path) -> None:
    with lane(alice) as open_lane:
        committed(alice, open_lane)
        before = theta_bits(live)
        write_tokens(tokens, *LINES[1:])
        open_lane.send(commit_message(alice, open_lane))
        assert open_lane.refusal().error == "UNAUTHENTICATED"
        assert theta_bits(live) == before


@linux_only
def test_a_token_that_is_withdrawn_before_its_holder_comes_opens_no_lane(live: Live, alice: Worker, tokens: Path) -> None:
    offered = offer(alice)
    write_tokens(tokens, *LINES[1:])
    for lane in (tcp(offered.port), unix(offered.socket)):
        with lane:
            lane.send(hello(offered.token))
            assert lane.refusal().error in ("UNAUTHENTICATED", "INVALID_REQUEST")  # unknown, or used up by the first


def test_a_lease_stays_its_owners_when_the_server_comes_back(tmp_path: Path, tokens: Path) -> None:
    configuration = config(tokens=tokens, checkpoint_dir=tmp_path / "checkpoints")
    with serving(configuration) as live, with_token(live, ALICE) as wire:
        alice = wire.started("alice")
        alice.commit()
    with serving(replace(configuration, resume=True)) as live:
        with with_token(live, BOB) as thief:
            assert_refused(thief.whole("Commit", alice.header(), *alice.body()).refusal(), DENIED)
        with with_token(live, ALICE) as wire:
            alice.wire = wire
            assert alice.commit()[0].version == 2


@pytest.mark.parametrize("asked_first", [False, True], ids=["now asked for", "no longer asked for"])
def test_when_credentials_come_or_go_with_a_restart_leases_end(asked_first: bool, tmp_path: Path, tokens: Path) -> None:
    before, after = (tokens, None) if asked_first else (None, tokens)
    configuration = config(tokens=before, checkpoint_dir=tmp_path / "checkpoints")
    with serving(configuration) as live, with_token(live, ALICE) as wire:
        alice = wire.started("alice")
        alice.commit()
    with serving(replace(configuration, tokens=after, resume=True)) as live, with_token(live, ALICE) as wire:
        refusal = wire.whole("Commit", alice.header(), *alice.body()).refusal()
        assert (refusal.error, refusal.reason) == ("LEASE_ENDED", "rolled_back")
        again = wire.join("alice")
        again.pull()
        assert again.commit()[0].version == 2


# -- tokens that change


def test_a_withdrawn_token_ends_an_open_stream_at_its_next_commit(live: Live, alice: Worker, tokens: Path) -> None:
    stream = alice.wire.stream("Commit")
    alice.commit_on(stream)
    before = theta_bits(live)
    write_tokens(tokens, *LINES[1:])
    stream.send(alice.header(), *alice.body())
    assert_refused(stream.refusal(), UNKNOWN)
    assert_refused(alice.wire.refusal("RenewLease", pb.RenewLeaseRequest(lease_id=alice.lease_id)), UNKNOWN)
    assert theta_bits(live) == before


def test_a_workers_token_can_be_changed_in_mid_run(live: Live, alice: Worker, tokens: Path) -> None:
    fresh = "fresh-0123456789abcdef"
    write_tokens(tokens, *LINES, f"{fresh} worker alice")
    with with_token(live, fresh) as wire:
        alice.wire = wire
        assert alice.commit()[0].version == 1


# -- with client certificates too


def test_a_token_alone_does_not_use_a_lease_that_was_opened_with_a_certificate_too(tmp_path: Path, tokens: Path) -> None:
    """Two workers that share a token are told apart by their certificates."""
    authority = Authority(tmp_path)
    own, one, two = (authority.issue(name) for name in ("server", "one", "two"))
    root = authority.cert.read_bytes()
    shown = [grpc.ssl_channel_credentials(root, pair.key.read_bytes(), pair.cert.read_bytes()) for pair in (one, two)]
    tls = TlsFiles(own.cert, own.key, authority.cert)
    with serving(config(tokens=tokens, tls=tls)) as live, ExitStack() as stack:
        first, second = (stack.enter_context(wired(live, bearing(ANY), credentials)) for credentials in shown)
        worker = first.started("one")
        assert_refused(second.whole("Commit", worker.header(), *worker.body()).refusal(), DENIED)
        assert worker.commit()[0].version == 1
        with wired(live, (), shown[0]) as without_token:
            assert_refused(without_token.refusal("GetStatus", pb.GetStatusRequest()), UNKNOWN)
