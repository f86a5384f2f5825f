"""Replies to commits that wait for other workers' commits. The core decides when each is made; here its call waits for that."""

from __future__ import annotations

from asyncio import Future, TimerHandle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gem_api.errors import LeaseEnded

from gem_server.core.commits import Step
from gem_server.core.releases import Releases
from gem_server.core.values import Ended
from gem_server.event_loop import DecidingLoop

Waited = Callable[[str, float], None]
"""Takes a worker's name and the seconds that its reply has waited, which may be 0."""


@dataclass(frozen=True, eq=False)
class _Held:
    lease_id: str
    worker: str
    since: float
    released: Future[None]


@dataclass(eq=False)
class HeldReplies:
    """Holds replies. While one is held, only its call waits: for a future, and without the loop's lock.

    Attributes:
        releases: Decides.
        loop: Its lock guards all of this.
        clock: Returns monotonic seconds.
        queue: Queues a plan between two commits: see `ApplyLoop.queue`.
        at_once: Whether these leases' replies may be made at once on this thread; `between`: it is between two commits.
        observers: Called for each commit that a reply could be held for.
    """

    releases: Releases
    loop: DecidingLoop
    clock: Callable[[], float]
    queue: Callable[[Callable[[], Callable[[], None]]], Future[None]]
    at_once: Callable[[Sequence[str], bool], bool]
    observers: Sequence[Waited]
    _held: dict[str, _Held] = field(default_factory=dict)
    _timer: TimerHandle | None = None
    _look_at: float = 0.0
    _closed: bool = False

    def get(self, lease_id: str) -> Future[None] | None:
        """Done once the lease's held reply is made; None if none is held."""
        held = self._held.get(lease_id)
        return held.released if held is not None else None

    def applied(self, step: Step, now: float) -> None:
        """Call this right after a commit, and before the next one: its reply may be held, and release others."""
        lease = step.commit.lease
        if self.releases.applied(step, now) and not self._closed:
            self._held[lease.lease_id] = _Held(lease.lease_id, lease.worker, now, self.loop.create_future())
        else:
            self.releases.forget(lease.lease_id)
            self._observe(lease.worker, 0.0)
        self._look(between=True)

    def release(self, lease_id: str, released: Future[None] | None = None) -> None:
        """Has a lease's held reply, or this one alone, made at once if there is one: its worker asks again, or will, as its
        call has ended."""
        if (released is None or self.get(lease_id) is released) and self.releases.release(lease_id, self.clock()):
            self._release([lease_id])

    def give_up(self, lease_id: str) -> None:
        """Forgets a lease's held reply: its worker goes on without it."""
        if (held := self._held.get(lease_id)) is not None:
            self._end(held)

    def lease_ended(self, ended: Ended) -> None:
        """A held reply of its worker is given up, and nobody waits for its next commit."""
        if (held := self._held.get(ended.lease_id)) is not None:
            self._end(held, LeaseEnded(f"the lease has ended ({ended.reason}): register again", ended.reason))
        if self._held:
            self._look()

    def close(self) -> None:
        """Has all held replies made at once, and holds none from now on: the server shuts down."""
        self._closed = True
        now = self.clock()
        if waiting := [lease_id for lease_id in self._held if self.releases.release(lease_id, now)]:
            self._release(waiting)

    # -- releasing

    def _look(self, between: bool = False) -> None:
        """Releases the replies whose time has come, and sees to the next look."""
        if due := self.releases.due(self.clock()):
            self._release(due, between)
        look = self.releases.next_look(now := self.clock())
        if look is None or (self._timer is not None and look >= self._look_at):
            return  # an earlier look sees to it
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = look
        self._timer = self.loop.call_later(max(0.0, look - now), self._timed)
        self.loop.wake()  # this may be a thread of the lane

    def _timed(self) -> None:
        self._timer = None
        self._look()

    def _release(self, lease_ids: Sequence[str], between: bool = False) -> None:
        plan, made = partial(self.releases.plan, lease_ids), [self._held[lease_id] for lease_id in lease_ids]
        if self.at_once(lease_ids, between):
            plan()()
            self._made(made)
        else:
            self.queue(plan).add_done_callback(partial(self._made, made))

    def _made(self, made: Sequence[_Held], done: Future[Any] | None = None) -> None:
        error = done.exception() if done is not None and not done.cancelled() else None
        for held in made:
            self._end(held, error)

    def _end(self, held: _Held, error: BaseException | None = None) -> None:
        """A reply is held no longer. If it can't be made, its call fails."""
        if self._held.get(held.lease_id) is not held:
            return  # it was given up
        del self._held[held.lease_id]
        self.releases.forget(held.lease_id)
        self._observe(held.worker, self.clock() - held.since)
        if error is None:
            held.released.set_result(None)
        else:
            held.released.set_exception(error)
            held.released.exception()  # its call may have ended: avoids asyncio's warning

    def _observe(self, worker: str, seconds: float) -> None:
        for observe in self.observers:
            observe(worker, seconds)
