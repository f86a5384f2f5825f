"""A commit whose outcome is not known yet, and the batches that it covers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gem_api.framing import empty
from gem_api.layout import Vector
from gem_api.update_kind import UpdateKind

from gem_client.answer import Base
from gem_client.run.commit_span import UNTRACED, CommitSpan


@dataclass(eq=False)
class HeldShard:
    """A shard that this worker holds. Its batches are cut one by one, when they are handed out.

    Attributes:
        shard_id: Its number.
        generation: The number of its lease.
        indices: Its sample indices.
        sizes: The sizes of its batches if they vary at random; None: each batch gets the size that is asked for.
        batches: Those that were cut so far.
        left: The number of these that are not committed yet.
    """

    shard_id: int
    generation: int
    indices: Sequence[int]
    sizes: Iterator[int] | None = None
    batches: list[Batch] = field(default_factory=list)
    left: int = 0
    _cut: int = 0

    @property
    def uncut(self) -> int:
        """Samples that are in no batch yet."""
        return len(self.indices) - self._cut

    @property
    def done(self) -> bool:
        """Whether every sample was in a batch that is committed or skipped."""
        return not self.left and not self.uncut

    def cut(self, size: int, whole: int) -> Batch:
        """Returns the next batch, of `size` samples if there are as many. A batch smaller than `whole` also takes the last one
        of the shard rather than leave it alone: BatchNorm fails on a single sample."""
        if self.sizes is not None:
            size = next(self.sizes)
        elif 1 < size < whole and self.uncut == size + 1:
            size += 1
        batch = Batch(list(self.indices[self._cut : self._cut + size]), self)
        self._cut += batch.samples
        self.batches.append(batch)
        self.left += 1
        return batch


@dataclass(eq=False)
class Batch:
    """A batch of a shard: its sample indices, and how often the loop got it and made no step."""

    indices: list[int]
    shard: HeldShard
    times_without_step: int = 0

    @property
    def samples(self) -> int:
        return len(self.indices)


@dataclass(eq=False)
class PendingCommit:
    """A commit until its outcome is known. `Commits` completes it, and `Membership.commit` has each `Link` send its part.

    Attributes:
        kind: The kind of the update.
        loss: Training loss of the batches; None if it is not known.
        samples: Number of samples that the update was computed on; None: those of the batches.
        base: The θ that it was computed on.
        update: The update as it is sent: float32, shape (P,), weight decay included.
        batches: The batches that it covers.
        share: The share of a whole batch that it was computed on; 0: it counts as a whole one.
        sequence: Its number in the lease, the same on all servers; 0 until it is sent.
        answered: The ranges whose servers have applied or rejected their part.
        span: Its span in the worker's trace.
    """

    kind: UpdateKind
    loss: float | None
    samples: int | None
    base: Base
    update: Vector = field(default_factory=lambda: empty(0))
    batches: Sequence[Batch] = ()
    share: float = 0.0
    sequence: int = 0
    answered: set[int] = field(default_factory=set)
    span: CommitSpan = UNTRACED
