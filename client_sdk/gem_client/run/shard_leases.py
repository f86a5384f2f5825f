"""A session's side of the shards: leases them from the server, reports them, and says which batches a commit covers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from numbers import Integral

from gem_api.errors import InvalidRequest, LeaseEnded, TransportError
from gem_api.hyperparameters import Hyperparameters

from gem_client.retry import Retry
from gem_client.run.batch_sizes import smallest_batch
from gem_client.run.membership import Membership
from gem_client.run.shards import Batch, LeasedShard, Shards
from gem_client.transport.connection import Connection
from gem_client.transport.side_thread import SideThread

log = logging.getLogger("gem_client")


class ShardLeases:
    """The shards of one session. A session without a sampler has none, and its commits cover no batches.

    Args:
        member: The session's membership, whose lease holds the shards.
        connection: The calls to the server, one attempt each.
        retry: How long to retry.
        side: The thread that makes the calls, while the caller computes.
        wait_for_commit: Waits for the commit under way, if there is one.

    Attributes:
        batches_per_step: Number of batches that the loop computes each of its steps on.
        skipped: Number of batches that were left out of the run by `skip`.
    """

    def __init__(
        self,
        member: Membership,
        connection: Connection,
        retry: Retry,
        side: SideThread,
        wait_for_commit: Callable[[], None],
    ) -> None:
        self._member = member
        self._connection = connection
        self._retry = retry
        self._side = side
        self.wait_for_commit = wait_for_commit
        self._shards: Shards | None = None
        self._window: list[Batch] = []  # batches of the local steps that the next commit covers
        self._completing: Future[None] | None = None
        self.batches_per_step = 1
        self.skipped = 0

    def open(self, samples: int, batch_size: int | None) -> Shards:
        """Makes the session's only iterator over batches. Raises InvalidRequest the second time."""
        if self._shards is not None:
            raise InvalidRequest("this session has a sampler already: use that one")
        if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 0):
            raise InvalidRequest(f"a batch holds a whole number of samples, at least 1, not {batch_size!r}")
        settings = self.hyperparameters
        batch_size = batch_size or settings.batch_size
        if batch_size > settings.shard_size:
            log.warning(
                "batches hold at most %d samples instead of %d, the run's shard size: start the run with a larger shard_size",
                settings.shard_size, batch_size,
            )  # fmt: skip
        commit = batch_size * self.batches_per_commit
        if settings.batch_variation and smallest_batch(batch_size, settings.batch_variation) == batch_size:
            log.warning(
                "batches of %d are too small for batch_variation %g: start the run with a larger --batch-size",
                batch_size, settings.batch_variation,
            )  # fmt: skip
        elif settings.batch_variation and settings.shard_size < 2 * commit:
            log.warning(
                "batches do not vary: a commit takes a whole shard of %d samples; start the run with shard_size %d or more",
                settings.shard_size, 4 * commit,
            )  # fmt: skip
        self._shards = Shards(self, samples, batch_size)
        return self._shards

    # -- what `Shards` asks of the session

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The run's hyperparameters. Raises InvalidRequest before the first registration."""
        return self._member.hyperparameters

    @property
    def steps_done(self) -> int:
        """Number of commits applied under this worker's name in this run."""
        return self._member.steps_done

    @property
    def generation(self) -> int:
        """Number of leases that the session has held."""
        return self._member.generation

    @property
    def batches_per_commit(self) -> int:
        """Number of batches that one commit covers: those of one step, times the run's local steps."""
        return self.batches_per_step * max(1, self.hyperparameters.local_steps)

    # -- calls to the server

    def lease(self, samples: int, holding: Collection[int]) -> Future[LeasedShard]:
        """Requests a shard, and keeps the shards `holding`. Takes a new lease if the present one has ended."""
        self._member.require_usable()
        return self._side.submit(self._lease, samples, holding)

    def complete(self, shard_id: int) -> None:
        """Reports a shard as complete. If that fails, it goes back with the next `lease` and is trained on again."""
        self._completing = self._side.submit(self._complete, self._member.registration.lease_id, shard_id)

    def wait_for_reports(self) -> None:
        """Waits until every shard that was complete is reported."""
        if self._completing is not None:
            self._completing.result()

    # -- the batches of a commit

    @property
    def in_hand(self) -> int:
        """Batches that the loop has and that no commit and no skip covers yet; 0 if that is not known."""
        return self._shards.in_hand if self._shards is not None else 0

    def add_to_window(self, batches: int) -> None:
        """The loop made a local step with `batches` batches: the next commit covers them too."""
        if self._shards is not None:
            self._window += self._shards.claim(batches)

    def claim(self, batches: int | None) -> list[Batch]:
        """The batches that the next commit covers: those of its local steps, and `batches` more that the loop has. None: those
        of one step."""
        if self._shards is None:
            return []
        batches = self.batches_per_step if batches is None else batches
        claimed, self._window = [*self._window, *self._shards.claim(batches)], []
        return claimed

    def committed(self, claimed: Sequence[Batch]) -> None:
        """The commit that covers these batches was applied, or rejected for its content."""
        if self._shards is not None:
            self._shards.committed(claimed)

    def dropped(self, claimed: Sequence[Batch]) -> None:
        """The commit that covers these batches was dropped, or its outcome is unknown: they are trained on again."""
        if self._shards is not None:
            self._shards.dropped(claimed)

    def skip(self, batches: int) -> None:
        """Leaves the last `batches` batches out of the run. Raises InvalidRequest if the loop has fewer."""
        if self._shards is None:
            raise InvalidRequest("no batch can be skipped: this session has no sampler. Make one first")
        self._shards.skip(batches)
        self.skipped += batches

    def _lease(self, samples: int, holding: Collection[int]) -> LeasedShard:
        response = self._member.under_lease(lambda lease_id: self._connection.lease_shard(lease_id, samples, holding))
        return LeasedShard(response, self._member.generation)

    def _complete(self, lease_id: str, shard_id: int) -> None:
        with contextlib.suppress(LeaseEnded, TransportError):
            self._retry.call(lambda: self._connection.complete_shard(lease_id, shard_id), self._member.report)
