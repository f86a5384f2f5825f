"""Thousands of hostile calls: each gets a typed status. θ does not change, and nothing leaks or breaks."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from fuzz.mutations import mutated
from gem_api.v1 import admin_pb2, tensors_pb2
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import (
    RPCS,
    SMALL,
    Refusal,
    Wire,
    Worker,
    chunk,
    chunks,
    initialize_header,
    on_server_loop,
    path,
    theta_bits,
)
from kit.server import DEADLINE, Live, wait_until

AT_ONCE = 32
# What grpc's asyncio client calls its own failure when it writes to a call that the server has just ended; the server's
# status is lost to it then, so the same frames are sent once more.
OWN_FAILURE = "Internal error from Core"
WRITES_TOO_LATE = 5
FUZZED = sorted(set(RPCS) - {"Drain"})  # a well-formed Drain is obeyed, and any bytes may be one
TYPED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
Corpus = dict[str, list[bytes]]


def corpus(victim: Worker) -> Corpus:
    """Frames that each RPC might take, with a live lease in them. Gradients are all NaN: none may ever be applied."""
    lease = victim.lease_id
    poison = np.full(SMALL.size, np.nan, np.float32)
    other = pb.RegisterWorkerRequest(worker_name="fuzzer", layout=SMALL.to_message())
    messages: dict[str, list[Any]] = {
        "RegisterWorker": [other, pb.RegisterWorkerRequest()],
        "Pull": [pb.PullRequest(lease_id=lease), pb.PullRequest()],
        "OpenLane": [pb.OpenLaneRequest(lease_id=lease)],
        "RenewLease": [pb.RenewLeaseRequest(lease_id=lease)],
        "LeaveCluster": [pb.LeaveClusterRequest(lease_id=lease[:-1])],
        "LeaseShard": [pb.LeaseShardRequest(lease_id=lease, sample_count=count) for count in (1, 10, 2**64 - 1)],
        "CompleteShard": [pb.CompleteShardRequest(lease_id=lease, shard_id=1)],
        "ReportEvaluation": [pb.ReportEvaluationRequest(version=2**64 - 1, loss=float("nan"), accuracy=0.5)],
        "GetStatus": [pb.GetStatusRequest()],
        "CreateCheckpoint": [admin_pb2.CreateCheckpointRequest()],
        "ReadCheckpoint": [admin_pb2.ReadCheckpointRequest(path="/etc")],
        "ListQuarantine": [admin_pb2.ListQuarantineRequest()],
        "LiftQuarantine": [admin_pb2.LiftQuarantineRequest(worker_name="fuzzer")],
    }
    frames = {rpc: [message.SerializeToString() for message in given] for rpc, given in messages.items()}
    frames["InitializeCentral"] = [initialize_header(lease), *chunks(poison, pb.InitializeCentralRequest)]
    frames["Commit"] = [
        victim.header(),
        victim.header(sequence=2**64 - 1),
        victim.header(lease_id=lease[:-1]),
        victim.header(sample_count=2**64 - 1, loss=float("inf")),
        victim.header(wire_dtype=tensors_pb2.WIRE_DTYPE_INT8_BLOCK, theta_dtype=tensors_pb2.WIRE_DTYPE_BFLOAT16),
        victim.header() + chunks(poison)[0],
        *chunks(poison),
        *chunks(poison, size=8),
        chunk(2**64 - 1, b""),
    ]
    return frames


def fuzzed(dice: random.Random, frames: list[bytes]) -> bytes:
    """Random bytes, a damaged frame, or a right one in the wrong place."""
    match dice.randrange(4):
        case 0:
            return dice.randbytes(dice.randrange(64))
        case 1:
            return dice.choice(frames)
        case _:
            return mutated(dice, dice.choice(frames))


def fuzzed_call(dice: random.Random, rpc: str, frames: Corpus) -> list[bytes]:
    """What one call says: one frame, or for a stream up to six, often opened by a right header."""
    if not RPCS[rpc].client_streaming:
        return [fuzzed(dice, frames[rpc])]
    opening = [frames[rpc][0]] if dice.random() < 0.5 else []
    return opening + [fuzzed(dice, frames[rpc]) for _ in range(dice.randrange(6))]


async def ask(channel: grpc.aio.Channel, rpc: str, frames: list[bytes]) -> Refusal:
    """Says the frames, half-closes, and reads to the end."""
    call = channel.stream_stream(path(rpc))(iter(frames), timeout=DEADLINE)
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError as error:
        return Refusal.of(error)
    return Refusal(await call.code(), "", "", "")


def storm(
    live: Live, seed: int, draw: Callable[[random.Random], tuple[str, list[bytes]]], calls: int
) -> Counter[tuple[str, str, str]]:
    """Makes the calls, AT_ONCE at a time, and counts (rpc, status, error); fails at an untyped status."""
    dice, seen = random.Random(seed), Counter[tuple[str, str, str]]()

    async def caller(channel: grpc.aio.Channel, share: int) -> None:
        for _ in range(share):
            rpc, frames = draw(dice)
            refusal = await ask(channel, rpc, frames)
            for _ in range(WRITES_TOO_LATE):
                if refusal.details != OWN_FAILURE:
                    break
                refusal = await ask(channel, rpc, frames)
            shown = [frame.hex() for frame in frames]
            assert refusal.status is not None
            assert refusal.status in TYPED, (rpc, refusal, shown)
            assert (refusal.status == grpc.StatusCode.OK) == (refusal.error == ""), (rpc, refusal, shown)
            seen[rpc, refusal.status.name, refusal.error] += 1

    async def all_callers() -> None:
        async with grpc.aio.insecure_channel(live.address) as channel:
            await asyncio.gather(*(caller(channel, calls // AT_ONCE) for _ in range(AT_ONCE)))

    on_server_loop(live, all_callers)
    return seen


@pytest.mark.parametrize("calls", [1_600, pytest.param(10_000, marks=pytest.mark.long)])
def test_fuzzed_calls_get_typed_answers_and_change_nothing(calls: int, live: Live, wire: Wire, worker: Worker) -> None:
    live.on_loop(lambda: setattr(live.core.leases, "duration", 1e6))  # the storm may take long on a slow machine
    alone = live.on_loop(lambda: live.core.memory.held)
    stream = wire.stream("Commit")
    worker.commit_on(stream)
    victim = wire.join("victim")
    victim.pull()
    before, frames = theta_bits(live), corpus(victim)
    turns = itertools.count()

    def draw(dice: random.Random) -> tuple[str, list[bytes]]:
        rpc = FUZZED[next(turns) % len(FUZZED)]
        return rpc, fuzzed_call(dice, rpc, frames)

    seen = storm(live, 20180521, draw, calls)

    for rpc in FUZZED:
        mine = {status for name, status, _ in seen if name == rpc}
        assert "INVALID_ARGUMENT" in mine, f"{rpc} was never sent bytes that do not parse"
        assert sum(count for (name, _, _), count in seen.items() if name == rpc) >= calls // len(FUZZED) - AT_ONCE
    errors = {error for name, _, error in seen if name == "Commit"}
    assert {"INVALID_REQUEST", "INCOMPLETE_TRANSFER", "NON_FINITE_GRADIENT", "SEQUENCE_GAP", "LEASE_ENDED"} <= errors
    assert theta_bits(live) == before
    assert worker.commit_on(stream)[0].version == before[0] + 1
    assert wire.status().version == before[0] + 1
    survivors = live.on_loop(lambda: [lease for lease in live.core.leases.live if lease != worker.lease_id])
    for lease in survivors:
        wire.call("LeaveCluster", pb.LeaveClusterRequest(lease_id=lease))
    wire.call("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id))
    wait_until(lambda: live.on_loop(lambda: live.core.memory.held) == alone, "all memory of others to be freed")


def test_calls_that_supersede_each_other_all_end(live: Live, wire: Wire, worker: Worker) -> None:
    """Whatever a call is doing when a newer one takes over, reading, waiting or answering, it is told so."""

    def draw(dice: random.Random) -> tuple[str, list[bytes]]:
        return "Pull", [pb.PullRequest(lease_id=worker.lease_id).SerializeToString()]

    seen = storm(live, 2, draw, 5 * AT_ONCE)
    assert seen.keys() == {("Pull", "OK", ""), ("Pull", "ABORTED", "SUPERSEDED")}
    assert worker.commit()[0].version == 1
