"""A worker's shards over the server's own ledger, without a server between them; and servers that ask for a share."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client.run.link import Link
from gem_client.run.pending_commit import Batch
from gem_client.run.shards import Shards
from gem_server.core.shards import NoShard, ShardLedger


class Member:
    """As the session's membership, for `Shards`. Each sample of each epoch has an index of its own.

    Attributes:
        links: `links.leader.batch_share` is the share that the server asks for.
    """

    def __init__(self, settings: Hyperparameters, kind: pb.UpdateKind = pb.UPDATE_KIND_GRADIENT) -> None:
        self.hyperparameters = settings
        self.registration = SimpleNamespace(update_kind=kind, lease_id="1")
        self.generation, self.steps_done = 1, 0
        self.links = SimpleNamespace(leader=SimpleNamespace(batch_share=1.0))
        self.ledger = ShardLedger(settings)

    def require_usable(self) -> None:
        pass

    def lease_shard(self, samples: int, holding: Collection[int], fingerprint: bytes) -> pb.LeaseShardResponse:
        lease_id = self.registration.lease_id
        self.ledger.release(lease_id, holding)
        shard = self.ledger.lease(lease_id, "a", samples)
        if isinstance(shard, NoShard):
            return pb.LeaseShardResponse(complete=True) if shard.complete else pb.LeaseShardResponse(wait_seconds=0.0)
        indices = [int(index) + shard.epoch * samples for index in self.ledger.indices(shard)]
        return pb.LeaseShardResponse(shard=pb.Shard(shard_id=shard.shard_id, indices=indices))

    def warn_of_missing_workers(self) -> None:
        pass

    def warn_of_last_shards(self) -> None:
        pass

    def complete_shard(self, lease_id: str, shard_id: int) -> None:
        self.ledger.complete(lease_id, shard_id)

    def lose_lease(self) -> None:
        """The lease ends, and the worker takes another one."""
        self.ledger.release(self.registration.lease_id)
        self.generation += 1
        self.registration.lease_id = str(self.generation)
        self.links.leader.batch_share = 1.0


class AtOnce:
    """Does a task when it is submitted."""

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done


def shards_of(member: Member, samples: int, batches_per_step: int = 1) -> Shards:
    """The shards of a worker whose whole batches have the run's batch size."""
    shards = Shards(member, AtOnce(), lambda: None)  # type: ignore[arg-type]
    shards.batches_per_step = batches_per_step
    return shards.open(samples, None)


def commit(shards: Shards, member: Member, batches: int | None = None) -> tuple[list[Batch], float]:
    """Commits the batches in hand. Returns those that were applied, and the share in the header."""
    claimed = shards.claim(batches)
    share = shards.share_of(claimed, None)
    if any(batch.shard.generation != member.generation for batch in claimed):  # computed under a lease that has ended
        shards.lost(claimed)
        return [], share
    shards.committed(claimed)
    return claimed, share


class Asking(NamedTuple):
    """A server that asks each worker for the same share, and counts commits by theirs.

    Attributes:
        answer: What every CommitResult says: `batch_share` and `progress`. Empty: as an older server.
        told: The shares in the headers of the commits.
    """

    answer: dict[str, float]
    told: list[float]


def asking_for_half(monkeypatch: pytest.MonkeyPatch) -> Asking:
    """Has every server ask for half of a batch until `answer` is changed."""
    asks, attempt = Asking({"batch_share": 0.5}, []), Link.attempt

    def answered(self: Link, header: pb.CommitHeader, *arguments: Any) -> pb.CommitResult:
        asks.told.append(header.batch_share)
        result = attempt(self, header, *arguments)
        for name in ("batch_share", "progress"):
            result.ClearField(name)
            setattr(result, name, asks.answer.get(name, 0.0))
        return result

    monkeypatch.setattr(Link, "attempt", answered)
    return asks
