"""Leases: which workers are in the run, what the server holds for them, and when their leases end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from gem_api.errors import LeaseEnded
from gem_api.layout import Vector
from gem_api.region import Region
from gem_api.schedule import Eta
from gem_api.worker_theta import WorkerTheta

from gem_server.core.pace import Pace
from gem_server.core.timetable import Timetable
from gem_server.core.values import Applied, EndReason
from gem_server.rules.base import Buffers

REPLY = "answer"  # an optional buffer that receives the θ for the worker's next gradient
SPARE = "spare_snapshot"  # the second snapshot of a worker that overlaps
FIRST_TERM = 3  # a new worker has this many lease durations until its first sign of life
_REMEMBERED_ENDS = 10_000


@dataclass
class Lease:
    """One worker's membership in the run.

    Attributes:
        lease_id: A secret between server and worker.
        worker: The worker's name.
        expires_at: When it ends without a sign of life, in seconds of the caller's clock.
        starting: Whether its worker has only registered so far. It may be slow to start, and gets more time.
        buffers: What the rule keeps for the worker, each float32, shape (P,).
        sequence: Number of its last applied commit.
        last_applied: The facts of that commit, sent again if the commit is repeated.
        eta: η_t at its last applied commit: the scale of a moment that holds steps. None before the first one.
        base_version: Version of the θ that the worker was last given.
        progress: The run's progress right after its last commit, or when its worker pulled.
        reply_progress: The run's progress when its worker got its θ. A reply that was held comes later than `progress` says.
        spare_version: Version of the θ in the spare snapshot, for a worker that overlaps: see `swap_snapshots`.
        spare_progress: As `progress`, for the spare snapshot.
        region: Memory shared with the worker. None if tensors are sent instead.
        copied: Whether a gradient in the region is copied before it is used. If not, the rule checks what it reads.
        queued: The sequence of its commit that waits in the queue or is being applied; None if there is none.
        before_change: Called before a commit or a pull changes the buffers, while a checkpoint still needs them as they are. It
            may wait until the checkpoint is written: never call it on the event loop's thread.
        recorded: Number of the log record of its last commit.
        owner: Name of the only credentials that may use it; empty if the server asks for none.
        counted, counted_by_reference: What the totals of `LeaseTable` include for it.
        record_room: Bytes of a compressed gradient that are kept for the log, as it arrived, until they are on the disk.
        worker_theta: What its worker holds of θ, if that is sent as differences. A restart forgets it.
        frozen: Identifies the values of the parameters that its worker does not train; empty if that is not known.
        samples: Identifies the samples that its worker trains on, and their order; empty if that is not known.
        restored: Whether the server has restarted since the worker's last commit: it may have lost commits that the worker
            knows to be applied.
    """

    lease_id: str
    worker: str
    expires_at: float
    buffers: Buffers
    sequence: int = 0
    last_applied: Applied | None = None
    eta: Eta | None = None
    base_version: int = 0
    progress: float = 0.0
    reply_progress: float = 0.0
    spare_version: int = 0
    spare_progress: float = 0.0
    region: Region | None = None
    copied: bool = False
    queued: int | None = None
    before_change: Callable[[Lease], None] | None = None
    recorded: int = 0
    owner: str = ""
    frozen: bytes = b""
    samples: bytes = b""
    counted: int = 0
    counted_by_reference: bool = False
    record_room: int = 0
    worker_theta: WorkerTheta | None = None
    restored: bool = False
    starting: bool = False

    def about_to_change(self) -> None:
        """Call this before writing to the buffers."""
        if self.before_change is not None:
            self.before_change(self)

    @property
    def nbytes(self) -> int:
        """Bytes held for the worker, with its shared memory."""
        return self.own_nbytes + (self.region.nbytes if self.region is not None else 0)

    @property
    def own_nbytes(self) -> int:
        """Bytes that are freed with the lease: its shared memory lives on for as long as the worker maps it."""
        held = self.worker_theta.theta.nbytes if self.worker_theta is not None else 0
        return self.record_room + held + sum(array.nbytes for array in self.buffers.values())

    @property
    def by_reference(self) -> bool:
        """Whether its gradients are used where they lie, in the region."""
        return self.region is not None and not self.copied

    @property
    def shared_reply(self) -> Vector | None:
        """Shared memory where the worker reads its reply, float32, shape (P,); None if the reply is sent."""
        return self.region.theta if self.region is not None else None

    def buffers_and_reply(self) -> Buffers:
        """The buffers for the rule. If the reply lies in shared memory, the rule writes it there in the same pass."""
        if self.shared_reply is None or REPLY in self.buffers:
            return self.buffers
        return {**self.buffers, REPLY: self.shared_reply}

    @property
    def overlaps(self) -> bool:
        """Whether the worker computes a gradient while a commit is under way, and so has two snapshots."""
        return SPARE in self.buffers

    def swap_snapshots(self, base_version: int) -> None:
        """Makes `snapshot` the θ that a commit's gradient was computed on. Call it before the commit's arithmetic.

        A worker that overlaps computes its next gradient on its last reply or on the one before. The last reply must
        therefore survive a commit: a commit reads and overwrites the older of the two snapshots.
        """
        if not self.overlaps:
            return
        self.buffers["snapshot"], self.buffers[SPARE] = self.buffers[SPARE], self.buffers["snapshot"]
        if base_version == self.base_version:
            np.copyto(self.buffers["snapshot"], self.buffers[SPARE])
        self.spare_version, self.spare_progress = self.base_version, self.progress

    def progress_at(self, base_version: int) -> float | None:
        """The run's progress when the worker got the θ of that version; None if it was not given that one lately."""
        if base_version == self.base_version:
            return self.progress
        return self.spare_progress if self.overlaps and base_version == self.spare_version else None


@dataclass
class LeaseTable:
    """The live leases, oldest first, and the reasons why recent ones ended.

    Attributes:
        duration: Seconds that a lease lives without a sign of life.
        new_id: Makes lease ids that cannot be guessed.
        live: The live leases by id. Only this class changes it.
        nbytes: Bytes held for all of them, without shared memory. A running total, because there may be thousands.
        by_reference: How many of them have gradients that are used where they lie; a running total too.
        pace: When each worker last asked for what training needs.
        timetable: How long each worker's steps take.
        last_to_leave: The name of the last worker that left in order since the server started; empty before it.
    """

    duration: float
    new_id: Callable[[], str]
    live: dict[str, Lease] = field(default_factory=dict)
    nbytes: int = 0
    by_reference: int = 0
    _by_worker: dict[str, Lease] = field(default_factory=dict)
    ended: dict[EndReason, int] = field(default_factory=dict)
    last_to_leave: str = ""
    pace: Pace = field(init=False)
    timetable: Timetable = field(default_factory=Timetable)
    _looked_at: float | None = None
    _reasons: OrderedDict[str, tuple[EndReason, str]] = field(default_factory=OrderedDict)  # with the worker's name

    def __post_init__(self) -> None:
        self.pace = Pace(self.duration)

    def open(self, lease_id: str, worker: str, buffers: Buffers, now: float, owner: str = "") -> Lease:
        lease = Lease(lease_id, worker, now + self.duration, buffers, owner=owner)
        self.add(lease)
        self.pace.begin(lease_id, now)
        return lease

    def add(self, lease: Lease) -> None:
        """Adds a lease restored from a checkpoint."""
        self.live[lease.lease_id] = self._by_worker[lease.worker] = lease
        self.recount(lease)

    def recount(self, lease: Lease) -> None:
        """Call this when a live lease holds more or less memory than before, or other memory."""
        size = lease.own_nbytes
        self.nbytes += size - lease.counted
        self.by_reference += lease.by_reference - lease.counted_by_reference
        lease.counted, lease.counted_by_reference = size, lease.by_reference

    def leave_region(self, lease: Lease) -> None:
        """Has a lease's gradients and replies sent from now on: its worker may write to the region."""
        lease.region = None
        self.recount(lease)

    def owner(self, lease_id: str) -> str | None:
        """The owner of a live lease; None if there is no such lease."""
        lease = self.live.get(lease_id)
        return lease.owner if lease is not None else None

    @property
    def first_worker(self) -> str:
        """The worker that saves and reports for all: the oldest live one, else the last one that left in order."""
        return next((lease.worker for lease in self.live.values()), self.last_to_leave)

    def worker_of(self, lease_id: str) -> str | None:
        """The name of the worker whose lease it is, or was not long ago; None if that is not known."""
        lease = self.live.get(lease_id)
        return lease.worker if lease is not None else self._reasons.get(lease_id, (None, None))[1]

    def get(self, lease_id: str) -> Lease:
        """The live lease of that id. Raises LeaseEnded, with the reason if it is known."""
        lease = self.live.get(lease_id)
        if lease is not None:
            return lease
        self.require_not_ended(lease_id)
        raise LeaseEnded("no such lease: register again")

    def require_not_ended(self, lease_id: str) -> None:
        """Raises LeaseEnded, with the reason, if a lease of that id is known to have ended."""
        if lease_id in self._reasons:
            reason, _ = self._reasons[lease_id]
            raise LeaseEnded(f"the lease has ended ({reason}): register again", reason)

    def renew(self, lease_id: str, now: float) -> Lease:
        lease = self.get(lease_id)
        lease.expires_at, lease.starting = now + self.duration, False
        return lease

    def renew_training(self, lease_id: str, now: float, committed: bool = False) -> Lease:
        """Renews the lease and notes that the worker trains."""
        suspended = self._looked_at is not None and now - self._looked_at > self.duration / 2
        self.pace.seen(lease_id, now, committed, usual=not suspended)
        if suspended:
            self.timetable.interrupted(lease_id)
        return self.renew(lease_id, now)

    def stalled(self, now: float, busy: Callable[[str], bool]) -> list[Lease]:
        """The leases whose workers renew them, but no longer train. `busy` says whether a lease's tensors are being moved."""
        idle = [lease for lease in self.live.values() if lease.queued is None and not busy(lease.lease_id)]
        return [lease for lease in idle if self.pace.stalled(lease.lease_id, now)]

    def begin(self, now: float) -> None:
        """Gives each restored lease its whole time, however long the start took. Call it once workers can reach the server."""
        self._looked_at = now
        for lease in self.live.values():
            lease.expires_at = now + self.duration

    def extend_after_suspension(self, now: float) -> float:
        """Extends the leases by a long gap since the last call. Call it often, and before `expired`.

        In such a gap the server or its machine was suspended, and could not receive signs of life.

        Returns:
            Seconds by which the leases were extended; usually 0.
        """
        gap = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        if gap <= self.duration / 2:
            return 0.0
        self.pace.suspended(gap, now)
        self.timetable.suspended(gap, now)
        for lease in self.live.values():
            lease.expires_at = min(lease.expires_at + gap, now + self.duration)
        return gap

    def end(self, lease: Lease, reason: EndReason) -> None:
        del self.live[lease.lease_id]
        if self._by_worker.get(lease.worker) is lease:
            del self._by_worker[lease.worker]
        self.nbytes -= lease.counted
        self.by_reference -= lease.counted_by_reference
        lease.counted, lease.counted_by_reference = 0, False
        self.pace.end(lease.lease_id, stalled=reason is EndReason.STALLED)
        self.timetable.end(lease.lease_id)
        self.ended[reason] = self.ended.get(reason, 0) + 1
        if reason is EndReason.LEFT:
            self.last_to_leave = lease.worker
        self._reasons[lease.lease_id] = reason, lease.worker
        if len(self._reasons) > _REMEMBERED_ENDS:
            self._reasons.popitem(last=False)

    def expired(self, now: float, urgent: str | None = None) -> list[Lease]:
        """The leases whose time is up, except those with a commit in the queue.

        A worker that is starting has more time. The exception is the lease `urgent`, whose worker the others wait for.
        """
        return [lease for lease in self.live.values() if self._overdue(lease, now, urgent) and lease.queued is None]

    def _overdue(self, lease: Lease, now: float, urgent: str | None) -> bool:
        longer = lease.starting and lease.lease_id != urgent
        return lease.expires_at + longer * (FIRST_TERM - 1) * self.duration <= now

    def named(self, worker: str) -> Lease | None:
        """The live lease of the worker of that name."""
        return self._by_worker.get(worker)
