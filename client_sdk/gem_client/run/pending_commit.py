"""A commit whose outcome is not known yet, and the batches that it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gem_api.layout import Vector
from gem_api.update_kind import UpdateKind

from gem_client.answer import Base
from gem_client.run.commit_span import UNTRACED, CommitSpan


@dataclass(eq=False)
class HeldShard:
    """A shard that this worker holds, the number of its lease, and the number of its batches that are not committed yet."""

    shard_id: int
    generation: int
    batches: list[Batch] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False)
class Batch:
    """A batch of a shard: its sample indices, and how often the loop got it and made no step."""

    indices: list[int]
    shard: HeldShard
    in_vain: int = 0

    @property
    def samples(self) -> int:
        return len(self.indices)


@dataclass(eq=False)
class PendingCommit:
    """A commit from when it is packed until its outcome is known: `Membership.commit` has each `Link` send its part.

    Attributes:
        update: The update as it is sent: float32, shape (P,), weight decay included.
        kind: The kind of the update.
        loss: Training loss of the batches; None if it is not known.
        samples: Number of samples that the update was computed on; None: those of the batches.
        base: The θ that it was computed on.
        batches: The batches that it covers.
        sequence: Its number in the lease, the same on all servers; 0 until it is sent.
        answered: The ranges whose servers have applied or rejected their part.
        span: Its span in the worker's trace.
    """

    update: Vector
    kind: UpdateKind
    loss: float | None
    samples: int | None
    base: Base
    batches: Sequence[Batch] = ()
    sequence: int = 0
    answered: set[int] = field(default_factory=set)
    span: CommitSpan = UNTRACED
