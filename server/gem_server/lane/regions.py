"""The memory that leases share with workers on this machine: made, handed over, counted, and freed."""

from __future__ import annotations

import contextlib
import os
from asyncio import Future
from dataclasses import dataclass

from gem_api.errors import Overloaded
from gem_api.region import Region, create_region, held_elsewhere, open_again

from gem_server.core.state_machine import Core
from gem_server.event_loop import DecidingLoop

MAX_LEFT_OVER = 256  # regions that workers still map after their lease has ended; each keeps a descriptor open here


@dataclass
class _Handed:
    """A lease's region: its bytes; its descriptor once it is made; and the region itself for as long as the lease lives."""

    nbytes: int
    region: Region | None = None
    descriptor: int = -1

    @property
    def made(self) -> bool:
        return self.descriptor >= 0


class Regions:
    """At most one region for each lease. Its methods are called under the event loop's lock.

    Args:
        core: The state machine; it counts the memory.
        loop: The event loop, which has regions made on other threads.
    """

    def __init__(self, core: Core, loop: DecidingLoop) -> None:
        self._core = core
        self._loop = loop
        self._handed: dict[str, _Handed] = {}  # by lease, live or ended
        self._closed = False

    def prepare(self, lease_id: str) -> Future[None]:
        """Has the region of a live lease made, unless there is one. The future is done when there is one, and raises OSError or
        MemoryError if the system has no such memory, or can't tell who maps it.

        Raises:
            LeaseEnded: There is no such lease.
            Overloaded: There is no room for it, or too many of ended leases are still mapped.
        """
        self._core.leases.get(lease_id)
        handed = self._handed.get(lease_id)
        if handed is None:
            # Not on the lane's own thread: it would keep every other lane waiting.
            return self._loop.run_in_executor(None, self._make, lease_id, self._reserve(lease_id))
        if not handed.made:
            raise Overloaded("this lease's shared memory is being made for another connection: try again")
        made: Future[None] = self._loop.create_future()
        made.set_result(None)
        return made

    def hand_out(self, lease_id: str) -> tuple[Region, int]:
        """The region of a live lease, once it is prepared, and a descriptor of it for the worker. The caller closes it. Raises
        LeaseEnded or OSError."""
        self._core.leases.get(lease_id)
        handed = self._handed[lease_id]
        assert handed.region is not None
        return handed.region, open_again(handed.descriptor)

    def take_back(self) -> None:
        """Unmaps the regions of leases that have ended, and stops counting them once no process maps them any more."""
        for lease_id, handed in list(self._handed.items()):
            if not handed.made or lease_id in self._core.leases.live:
                continue
            handed.region = None
            with contextlib.suppress(OSError):  # no descriptor is free to find out with: asked again later
                if not held_elsewhere(handed.descriptor):
                    self._forget(lease_id)

    def close(self) -> None:
        """Closes every descriptor. Workers keep what they have mapped."""
        self._closed = True
        for lease_id, handed in list(self._handed.items()):
            if handed.made:
                self._forget(lease_id)

    def _reserve(self, lease_id: str) -> _Handed:
        """Counts a region's memory from before it is made until no process maps it any more."""
        self.take_back()
        if sum(other not in self._core.leases.live for other in self._handed) >= MAX_LEFT_OVER:
            raise Overloaded(f"{MAX_LEFT_OVER} regions are still mapped by workers whose lease has ended: end those processes")
        handed = self._handed[lease_id] = _Handed(self._core.memory.reserve_region())
        return handed

    def _make(self, lease_id: str, handed: _Handed) -> None:
        try:
            region, descriptor = create_region(self._core.central.size)
            try:
                _require_traceable(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:
            with self._loop.lock:
                self._forget(lease_id)
            raise
        with self._loop.lock:
            handed.region, handed.descriptor = region, descriptor
            if self._closed:
                self._forget(lease_id)
                raise Overloaded("the server is shutting down: try again once it has restarted")

    def _forget(self, lease_id: str) -> None:
        handed = self._handed.pop(lease_id, None)
        if handed is None:
            return
        self._core.memory.regions -= handed.nbytes
        if handed.made:
            os.close(handed.descriptor)


def _require_traceable(descriptor: int) -> None:
    """Raises OSError if the system can't tell whether other processes still map a region: its memory could not be counted."""
    theirs = open_again(descriptor)
    try:
        if not held_elsewhere(descriptor):
            raise OSError("this system does not report which processes map shared memory")
    finally:
        os.close(theirs)
