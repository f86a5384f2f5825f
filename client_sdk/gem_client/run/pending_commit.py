"""A commit whose outcome is not known yet, the batches that it covers, and its span in the worker's trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gem_api.framing import empty
from gem_api.layout import Vector
from gem_api.process import tracing
from gem_api.update_kind import UpdateKind

from gem_client.answer import Answer, Base
from gem_client.run.encoded import EncodedUpdate


@dataclass(eq=False)
class HeldShard:
    """A shard that this worker holds. Its batches are cut one by one, when they are handed out.

    Attributes:
        shard_id: Its number.
        generation: The number of its lease.
        epoch: The epoch that it belongs to, from 0.
        indices: Its sample indices.
        sizes: The sizes of its batches if they vary at random; None: each batch gets the size that is asked for.
        batches: Those that were cut so far.
        left: The number of these that are not committed yet.
    """

    shard_id: int
    generation: int
    epoch: int
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


class CommitSpan:
    """The span around a commit, retries included, in the worker's trace.

    Args:
        span: OpenTelemetry's span; None records nothing.

    Attributes:
        traceparent, tracestate: The W3C trace context, for the server; empty if there is none.
    """

    def __init__(self, span: Any = None) -> None:
        self._span = span
        self.traceparent, self.tracestate = ("", "") if span is None else tracing.context_of(span)

    @classmethod
    def begin(cls, worker: str, transport: str) -> CommitSpan:
        """Begins the span of a worker's commit, within the caller's own span, if the worker records a trace."""
        api = tracing.api()
        if api is None:
            return UNTRACED
        attributes = {"gem.worker": worker, "gem.transport": transport}
        span = tracing.tracer("gem_client").start_span("commit", kind=api.SpanKind.CLIENT, attributes=attributes)
        return cls(span) if span.is_recording() else UNTRACED

    def answered(self, answer: Answer) -> None:
        """Ends it with the commit's result."""
        if self._span is not None:
            self._span.set_attributes(
                {"gem.staleness": answer.staleness, "gem.version": answer.version, "gem.lost": answer.lost}
            )
            self._span.end()

    def failed(self, error: BaseException) -> None:
        """Ends it with an error."""
        if self._span is not None:
            self._span.record_exception(error)
            self._span.set_status(tracing.api().StatusCode.ERROR, f"{type(error).__name__}: {error}")
            self._span.end()


UNTRACED = CommitSpan()


@dataclass(eq=False)
class PendingCommit:
    """A commit until its outcome is known. `Commits` prepares it, and `Membership.commit` has each `Link` send its part.

    Attributes:
        kind: The kind of the update.
        loss: Training loss of the batches; None if it is not known.
        samples: Number of samples that the update was computed on.
        base: The θ that it was computed on.
        update: The update as it is sent: float32, shape (P,), weight decay included; or encoded already.
        batches: The batches that it covers.
        share: The share of a whole batch that it was computed on; 0: it counts as a whole one.
        sequence: Its number in the lease, the same on all servers; 0 until it is sent.
        answered: The ranges whose servers have applied or rejected their part.
        span: Its span in the worker's trace.
    """

    kind: UpdateKind
    loss: float | None
    samples: int
    base: Base
    update: Vector | EncodedUpdate = field(default_factory=lambda: empty(0))
    batches: Sequence[Batch] = ()
    share: float = 0.0
    sequence: int = 0
    answered: set[int] = field(default_factory=set)
    span: CommitSpan = UNTRACED
