"""Converts between the contract's messages and the core's facts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gem_api import __version__
from gem_api.errors import InvalidRequest
from gem_api.formats import CONTRACT
from gem_api.framing import varint
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.update_kind import KINDS, kind_of
from gem_api.v1 import training_pb2 as pb

from gem_server.core.shards import Shard
from gem_server.core.shuffle import Indices
from gem_server.core.state_machine import Core
from gem_server.core.values import Applied, Header, LeaderRegistration, Registration
from gem_server.durability.journal import Stall
from gem_server.rules import PiStatistics
from gem_server.telemetry.progress import Evaluation

_PIECE = 1 << 14  # samples that protobuf converts at a time, in about 2 ms
_SHARD_TAG = bytes([pb.LeaseShardResponse.SHARD_FIELD_NUMBER << 3 | 2])  # 2: a field with a length


def header(message: pb.CommitHeader) -> Header:
    return Header(
        lease_id=message.lease_id,
        sequence=message.sequence,
        base_version=message.base_version,
        fingerprint=message.layout_fingerprint,
        loss=message.loss if message.HasField("loss") else None,
        samples=message.sample_count,
        kind=kind_of(message.update_kind),
        share=message.batch_share,
    )


def commit_result(applied: Applied, base_version: int, progress: float = 0.0, share: float = 0.0) -> pb.CommitResult:
    """The result of a commit. `base_version` and `progress` are those of the θ sent with it: a pull after the commit may have
    made it newer. `share` is that of a whole batch for the worker's next gradient; 0 from a server that does not lead."""
    return pb.CommitResult(
        sequence=applied.sequence,
        ticket=applied.ticket,
        version=applied.version,
        base_version=base_version,
        staleness=applied.staleness,
        pi=_pi_summary(applied.pi) if applied.pi else None,
        discarded=applied.discarded,
        batch_share=share,
        progress=progress,
    )


def _pi_summary(pi: PiStatistics) -> pb.PiSummary:
    return pb.PiSummary(
        median=pi.median,
        zero_ratio=pi.zero_ratio,
        max_ratio=pi.max_ratio,
        proxy_energy=pi.proxy_energy,
        central_energy=pi.central_energy,
    )


def leader_registration(message: pb.LeadsAnswer) -> LeaderRegistration:
    """Raises InvalidRequest if the message is invalid."""
    if not re.fullmatch("[0-9a-f]{16,64}", message.lease_id):
        raise InvalidRequest(f"the leader's lease id has 16 to 64 characters of 0-9 and a-f, not {message.lease_id[:70]!r}")
    if not re.fullmatch("[!-~]{8}", message.run_id):  # as many as a log's segment holds
        raise InvalidRequest(f"the leader's run id has 8 printable characters, not {message.run_id[:70]!r}")
    try:
        return LeaderRegistration(message.lease_id, message.run_id, Hyperparameters.from_message(message.hyperparameters))
    except ValueError as error:
        raise InvalidRequest(f"the leader's hyper-parameters are invalid: {error}") from None


def registration(registration: Registration, core: Core, peers: Sequence[str] = ()) -> pb.RegisterWorkerResponse:
    layout: Layout = registration.layout
    return pb.RegisterWorkerResponse(
        lease_id=registration.lease_id,
        lease_seconds=core.leases.duration,
        hyperparameters=core.settings.to_message(),
        layout=layout.to_message(),
        layout_fingerprint=layout.fingerprint,
        must_initialize=registration.must_initialize,
        run_id=core.run_id,
        steps_done=registration.steps_done,
        update_kind=KINDS[core.rule.kind],
        peers=peers,
        contract=CONTRACT,
        release=__version__,
    )


def shard_response(shard: Shard, indices: Indices) -> bytes:
    """A serialised LeaseShardResponse with a shard; `indices` are its samples: uint64, shape (end - begin,).

    It is made in pieces. For a million samples, each call of protobuf would hold Python's global lock for a tenth of a second,
    and so keep all other threads waiting. A packed field may come in several pieces."""
    pieces = [pb.Shard(shard_id=shard.shard_id, epoch=shard.epoch, begin=shard.begin, end=shard.end).SerializeToString()]
    for at in range(0, indices.size, _PIECE):
        pieces.append(pb.Shard(indices=indices[at : at + _PIECE].tolist()).SerializeToString())
    return _SHARD_TAG + varint(sum(map(len, pieces))) + b"".join(pieces)


def evaluation(message: pb.ReportEvaluationRequest) -> Evaluation:
    return Evaluation(message.version, message.loss, message.accuracy if message.HasField("accuracy") else None)


def stall(stall: Stall | None, now: float) -> pb.Stall | None:
    if stall is None:
        return None
    seconds = now - stall.since
    return pb.Stall(reason=stall.why, seconds=seconds, needed_bytes=stall.needed or None, free_bytes=stall.free)
