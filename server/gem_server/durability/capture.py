"""A run's state at one version, for a checkpoint that is written while training continues.

θ is copied at once, between two commits; commits stop only for that long. A worker's buffers are copied on write: just before
its next commit or pull changes them, unless the checkpoint has written them by then. The copies go to memory prepared in
advance, as much of it as the memory limit allows.
"""

from __future__ import annotations

import threading

from gem_api.layout import Vector

from gem_server.core.leases import SPARE, Lease
from gem_server.core.memory_budget import FLOAT_BYTES
from gem_server.core.state_machine import Core
from gem_server.durability.scratch import Scratch
from gem_server.durability.state import State
from gem_server.rules.average import AVERAGE
from gem_server.rules.base import Buffers

_SHARED = ""  # takes the place of the lease id for buffers that the run keeps once


class Capture:
    """The content of a checkpoint. Create it between two commits.

    Args:
        core: The run.
        state: Everything except the tensors.
        scratch: Memory for the copies.

    Attributes:
        state: As given.
        model: θ by tensor name: float32, with the tensors' shapes. Empty before `copy_theta`.
        shapes: Shapes of the workers' buffers, by "<lease id>/<buffer>", and of those that the run keeps once, by "/<buffer>".
    """

    def __init__(self, core: Core, state: State, scratch: Scratch) -> None:
        self.state = state
        self.model: dict[str, Vector] = {}
        self._core = core
        self._scratch = scratch
        self._changed = threading.Condition()
        self._leases = list(core.leases.live.values())
        self._unsaved = {lease.lease_id: state_buffers(core, lease) for lease in self._leases}
        self._copies: dict[str, Buffers] = {_SHARED: run_buffers(core)}
        self._lent: list[Vector] = []
        self.shapes = {
            f"{lease_id}/{name}": buffer.shape
            for lease_id, mine in (self._copies | self._unsaved).items()
            for name, buffer in mine.items()
        }
        for lease in self._leases:
            lease.before_change = self._keep

    def copy_theta(self) -> None:
        """Copies θ and the buffers that the run keeps once. Call it before the next commit."""
        layout = self._core.central.layout
        assert layout is not None
        self.model = layout.split(self._scratch.copy(self._core.central.theta))
        self._copies[_SHARED] = {name: self._scratch.copy(each) for name, each in run_buffers(self._core).items()}

    def tensor(self, name: str) -> Vector:
        """A buffer as it was when the capture was created: float32, shape (P,), valid until the next call. Call it once for
        each name, in the order of `shapes`."""
        lease_id, _, buffer = name.rpartition("/")
        with self._changed:
            while self._lent:
                self._scratch.give_back(self._lent.pop())
            if lease_id in self._unsaved:
                self._copy(lease_id)
            self._changed.notify_all()
            self._lent.append(self._copies[lease_id].pop(buffer))
            return self._lent[0]

    def close(self) -> None:
        """Ends the capture: buffers are no longer copied before they change."""
        with self._changed:
            for lease in self._leases:
                if lease.before_change == self._keep:
                    lease.before_change = None
            self._unsaved.clear()
            self._copies.clear()
            self._changed.notify_all()

    def _keep(self, lease: Lease) -> None:
        """Copies a worker's buffers, which are about to change. If there is no memory for that, waits until the checkpoint has
        written them."""
        with self._changed:
            self._changed.wait_for(lambda: lease.lease_id not in self._unsaved or self._has_room(lease))
            if lease.lease_id in self._unsaved:
                self._copy(lease.lease_id)
            lease.before_change = None

    def _copy(self, lease_id: str) -> None:
        self._copies[lease_id] = {name: self._scratch.copy(buffer) for name, buffer in self._unsaved.pop(lease_id).items()}

    def _has_room(self, lease: Lease) -> bool:
        lacking = self._scratch.lacking(len(self._unsaved[lease.lease_id]))
        return not lacking or self._core.memory.fits(self._scratch.nbytes + lacking)


def copies_at_most(core: Core) -> int:
    """The number of copies, each of P float32 values, that a checkpoint of the current state may need. Fewer if the memory
    limit has no room for all; at least one, for θ."""
    wanted = 1 + len(run_buffers(core)) + sum(len(state_buffers(core, lease)) for lease in core.leases.live.values())
    while wanted > 1 and not core.memory.fits(wanted * core.central.size * FLOAT_BYTES):
        wanted -= 1
    return wanted


def run_buffers(core: Core) -> Buffers:
    """The buffers that the run keeps once: those that the rule shares between workers, and the average of θ."""
    average = core.central.average
    return core.shared.buffers | ({} if average is None else {AVERAGE: average})


def state_buffers(core: Core, lease: Lease) -> Buffers:
    """The buffers of a lease that belong to the run's state, and so to a checkpoint."""
    return {name: buffer for name, buffer in lease.buffers.items() if name in (*core.rule.buffers, SPARE)}
