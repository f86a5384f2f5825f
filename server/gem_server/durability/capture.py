"""A run's state at one version, written while the run goes on: copied on write, one worker at a time.

θ is copied at once, between two commits, and that is how long commits stop. A worker's buffers stay where they are; before its
next commit or pull changes them they are copied, unless they have been written by then.
"""

from __future__ import annotations

import threading
from typing import Any

from gem_api.layout import Vector

from gem_server.core import Core
from gem_server.leases import SPARE, Lease


class Capture:
    """What a checkpoint is to hold. Made between two commits.

    Args:
        core: The run.
        state: Everything but the tensors.

    Attributes:
        state: The same.
        model: θ by tensor: float32, of the tensors' shapes. Empty before `copy_theta`.
        shapes: Of the workers' buffers, by "<lease id>/<buffer>".
    """

    def __init__(self, core: Core, state: dict[str, Any]) -> None:
        self.state = state
        self.model: dict[str, Vector] = {}
        self._core = core
        self._changed = threading.Condition()
        kept = {*core.rule.buffers, SPARE}
        self._leases = list(core.leases.live.values())
        self._unsaved = {
            lease.lease_id: {name: buffer for name, buffer in lease.buffers.items() if name in kept} for lease in self._leases
        }
        self._copies: dict[str, dict[str, Vector]] = {}
        self.shapes = {
            f"{lease_id}/{name}": buffer.shape for lease_id, mine in self._unsaved.items() for name, buffer in mine.items()
        }
        for lease in self._leases:
            lease.before_change = self._keep

    def copy_theta(self) -> None:
        """Takes θ. Call it before the next commit."""
        layout = self._core.central.layout
        assert layout is not None
        self.model = layout.split(self._core.central.theta.copy())

    def tensor(self, name: str) -> Vector:
        """A worker's buffer as it was: float32, shape (P,). Each once, in the order of `shapes`."""
        lease_id, _, buffer = name.rpartition("/")
        with self._changed:
            if lease_id in self._unsaved:
                self._copy(lease_id)
                self._changed.notify_all()
            taken = self._copies[lease_id].pop(buffer)
            if not self._copies[lease_id]:
                del self._copies[lease_id]
            return taken

    def close(self) -> None:
        """Nothing is kept any more."""
        with self._changed:
            for lease in self._leases:
                if lease.before_change == self._keep:
                    lease.before_change = None
            self._unsaved.clear()
            self._copies.clear()
            self._changed.notify_all()

    def _keep(self, lease: Lease) -> None:
        """A worker's buffers are about to change. Where there is no memory for a copy, waits until they are written."""
        with self._changed:
            self._changed.wait_for(lambda: lease.lease_id not in self._unsaved or self._has_room(lease))
            if lease.lease_id in self._unsaved:
                self._copy(lease.lease_id)
            lease.before_change = None

    def _copy(self, lease_id: str) -> None:
        self._copies[lease_id] = {name: buffer.copy() for name, buffer in self._unsaved.pop(lease_id).items()}

    def _has_room(self, lease: Lease) -> bool:
        held = sum(buffer.nbytes for copies in self._copies.values() for buffer in copies.values())
        limit = self._core.memory_limit
        return not limit or self._core.memory_bytes + self._core.central.theta.nbytes + held + lease.nbytes <= limit
