"""The memory that a run takes, and its limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from gem_api.errors import Overloaded
from gem_api.framing import empty, upload_buffers
from gem_api.layout import Layout, Vector
from gem_api.region import region_bytes
from gem_api.worker_theta import WorkerTheta

from gem_server.core.central_variable import CentralVariable
from gem_server.core.leases import SPARE, Lease, LeaseTable
from gem_server.rules import UpdateRule, is_users
from gem_server.rules.base import Buffers

FLOAT_BYTES = 4
MAX_COPIES = 4  # copies of θ, at different versions, for readers without a lease


@dataclass
class Memory:
    """Counts θ, its average and copies, the rule's shared buffers and temporaries, the buffers of each worker, and those
    where gradients arrive.

    Attributes:
        limit: Bytes that may be held; 0 for no limit.
        rule: The update rule; it determines which buffers exist.
        central: θ.
        leases: The workers.
        regions: Bytes of the shared memory that exists: being made, belonging to a lease, or still mapped by a worker whose
            lease has ended.
        uploads: Bytes where gradients arrive, as far as they exist; room for `usual_uploads` is kept.
    """

    limit: int
    rule: UpdateRule
    central: CentralVariable
    leases: LeaseTable
    regions: int = 0
    uploads: int = 0

    @contextmanager
    def under(self, rule: UpdateRule) -> Iterator[None]:
        """Counts as if the run had this rule, inside a `with` block."""
        before, self.rule = self.rule, rule
        try:
            yield
        finally:
            self.rule = before

    @property
    def held(self) -> int:
        """Bytes held at present."""
        uploads = max(self.uploads, self.usual_uploads)
        return self._central_bytes(self.central.size) + self.leases.nbytes + self.regions + uploads

    @property
    def most_for_worker(self) -> int:
        """Maximum bytes held for one worker. Without workers: what one without overlap or shared memory would take."""
        plain = self._worker_bytes(self.central.size, overlap=False)
        return max((lease.nbytes for lease in tuple(self.leases.live.values())), default=plain)

    def fits(self, nbytes: int) -> bool:
        """Whether the limit has room for `nbytes` more bytes."""
        return not self.limit or self.held + nbytes <= self.limit

    def require_room_for_worker(self, layout: Layout, overlap: bool, freed: Lease | None) -> None:
        """Raises Overloaded if there is no room for another worker once the lease `freed` has ended. Its shared memory still
        counts, because its process may go on mapping it."""
        each = self._worker_bytes(layout.size, overlap)
        others = len(self.leases.live) - (freed is not None)
        kept = self.leases.nbytes - (freed.counted if freed else 0) + self.regions
        uploads = self._usual_uploads(layout.size, others + 1 - self.leases.by_reference)
        needed = self._central_bytes(layout.size) + kept + each + max(self.uploads, uploads)
        if self.limit and needed > self.limit:
            raise Overloaded(
                f"no memory for worker number {others + 1}: {needed} bytes needed, {each} of them for it, "
                f"{self.limit} allowed; raise memory_limit or use fewer workers"
            )

    def reserve_region(self) -> int:
        """Counts a region of shared memory that is about to be made, and returns its size. The caller subtracts it from
        `regions` once the memory is free again. Raises Overloaded if there is no room for it."""
        size = region_bytes(self.central.size)
        if not self.fits(size):
            raise Overloaded(
                f"no memory for a shared region: {self.held + size} bytes needed, {self.limit} allowed; raise memory_limit"
            )
        self.regions += size
        return size

    def take_upload(self, slow: int) -> Vector | None:
        """Memory where a gradient arrives, float32, shape (P,); None if as much as the run may have exists already. The caller
        gives it back by `give_back`.

        Args:
            slow: Gradients that arrive slowly. The run may have so many more buffers, if the limit has room.

        Raises:
            Overloaded: The machine has no memory left.
        """
        beyond, nbytes = self.uploads - self.usual_uploads, self.central.size * FLOAT_BYTES
        if beyond >= 0 and not (beyond < slow * nbytes and self.fits(nbytes)):
            return None
        try:
            memory = empty(self.central.size)
        except MemoryError:
            raise Overloaded("this machine has no memory for a gradient that arrives: try again later") from None
        self.uploads += memory.nbytes
        return memory

    @property
    def usual_uploads(self) -> int:
        """Bytes where gradients arrive, without those of slow clients."""
        return self._usual_uploads(self.central.size, len(self.leases.live) - self.leases.by_reference)

    @property
    def most_uploads(self) -> int:
        """The number of gradients that may arrive in memory of their own at the same time, as the limit has room at present."""
        if not self.limit:
            return sys.maxsize
        room = max(0, self.limit - self.held)
        return (max(self.uploads, self.usual_uploads) + room) // (self.central.size * FLOAT_BYTES)

    def give_back(self, upload: Vector) -> None:
        """Stops counting memory of `take_upload`, which nobody may use any more."""
        self.uploads -= upload.nbytes

    def reserve_record(self, lease: Lease, nbytes: int) -> bool:
        """Whether a compressed gradient of the lease may be kept for the log as it arrived. If so, it counts until the lease
        ends. Otherwise the log gets what it was decoded to, which takes no more memory."""
        more = max(0, nbytes - lease.record_room)
        if not self.fits(more) or self.leases.live.get(lease.lease_id) is not lease:
            return False
        lease.record_room += more
        self.leases.recount(lease)
        return True

    def new_worker_theta(self, lease: Lease) -> WorkerTheta | None:
        """Forgets what a lease's worker holds of θ, and makes memory to keep that anew; None if there is no room. Whoever still
        sends the old one does not change the new one."""
        known, lease.worker_theta = lease.worker_theta is not None, None
        size = self.central.size
        if self.leases.live.get(lease.lease_id) is lease and (known or self.fits(size * FLOAT_BYTES)):
            with suppress(MemoryError):
                lease.worker_theta = WorkerTheta(size)
        self.leases.recount(lease)
        return lease.worker_theta

    def require_room_for_copy(self) -> None:
        """Raises Overloaded if there is no room to copy θ for another reader."""
        if self.central.copies >= MAX_COPIES:
            raise Overloaded(f"{MAX_COPIES} copies of the model are being read already: try again later")
        size = self.central.size * FLOAT_BYTES
        if not self.fits(size):
            raise Overloaded(
                f"no memory for another copy of the model: {self.held + size} bytes needed, {self.limit} allowed; "
                "try again later"
            )

    def take(self, layout: Layout, overlap: bool) -> tuple[Vector, Buffers]:
        """Allocates a worker's memory. Raises Overloaded if the machine has no memory left.

        Returns:
            θ (new memory for the first worker, else the current θ) and the worker's buffers: each float32, shape (P,).
        """
        try:
            theta = self.central.theta if self.central.initialized else empty(layout.size)
            buffers = {name: np.zeros(layout.size, np.float32) for name in self._buffers(overlap)}
            return theta, buffers
        except MemoryError:
            raise Overloaded(
                f"this machine has no memory for a model of {layout.size} parameters and one more worker"
            ) from None

    def take_shared(self) -> Buffers:
        """Allocates the rule's shared buffers, filled with zeros. Raises Overloaded if the machine has no memory left."""
        try:
            return {name: np.zeros(self.central.size, np.float32) for name in self.rule.shared}
        except MemoryError:
            raise Overloaded(f"this machine has no memory for the shared buffers of rule {self.rule.name}") from None

    def begin_average(self) -> None:
        """Begins the average of θ, if one is to be kept. Raises Overloaded if the machine has no memory left."""
        try:
            self.central.begin_average()
        except MemoryError:
            raise Overloaded("this machine has no memory for the average of θ: leave out --average") from None

    def _central_bytes(self, size: int) -> int:
        working = self.rule.temporaries
        if is_users(self.rule):  # the copies that undo the rule's changes if it raises
            working += 1 + len(self._buffers(overlap=True)) + len(self.rule.shared) + 1
        average = bool(self.central.decay)
        return size * FLOAT_BYTES * (1 + average + len(self.rule.shared) + working + self.central.copies)

    def _worker_bytes(self, size: int, overlap: bool) -> int:
        return size * FLOAT_BYTES * len(self._buffers(overlap))

    def _usual_uploads(self, size: int, workers: int) -> int:
        return size * FLOAT_BYTES * upload_buffers(workers, size * FLOAT_BYTES)

    def _buffers(self, overlap: bool) -> tuple[str, ...]:
        return (*self.rule.buffers, SPARE) if overlap else self.rule.buffers
