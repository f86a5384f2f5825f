"""The FIFO queue: commits are applied one at a time, in ticket order, in a separate thread with the GIL released."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from gem_api.errors import Draining, GemError, LeaseEnded, RuleFailed

from gem_server.commit_times import CommitTimes
from gem_server.core.commits import Commit, Step
from gem_server.core.leases import Lease
from gem_server.core.releases import Releases
from gem_server.core.state_machine import Core
from gem_server.core.values import Applied
from gem_server.event_loop import running_loop
from gem_server.held_replies import HeldReplies, Waited
from gem_server.rules import PiStatistics

T = TypeVar("T")
# Up to this size, work runs on the event loop's thread: it takes about a millisecond, and a hand-over to a thread half of one.
INLINE_PARAMETERS = 1 << 20


Observer = Callable[[Applied, CommitTimes], None]


class ApplyLoop:
    """Applies commits and runs what must happen between two of them.

    Args:
        core: The state machine. It is used under the event loop's lock only, except for `Step.run` and the work that plans
            given to `between_commits` return.
        clock: Returns monotonic seconds.
        observers: Called after every applied commit, in order.
        waited: Told how long replies were held.

    Attributes:
        held: The replies that wait for other workers' commits.
    """

    def __init__(
        self, core: Core, clock: Callable[[], float], observers: Sequence[Observer], waited: Sequence[Waited] = ()
    ) -> None:
        self._loop = running_loop()
        self._core = core
        self._clock = clock
        self._observers = observers
        self._queue: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]] | None] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "apply")
        self._closed = False
        self._busy = False
        self._answers: dict[str, asyncio.Future[Applied]] = {}
        self.held = HeldReplies(Releases(core), self._loop, clock, self.queue, self._may_release_now, waited)

    @property
    def queue_length(self) -> int:
        """Commits that wait or are being applied."""
        return len(self._answers)

    def submit(self, commit: Commit, times: CommitTimes) -> None:
        """Queues a commit, which must hold the newest ticket. `awaited` says what to wait for, `applied` returns its result.
        Notes in `times` when the rule began and ended.

        If the queue is empty and the model is small, the commit is applied at once, without the queue.
        """
        times.queued = self._clock()
        commit.upload.hold()
        if runs_inline(self._core, commit.lease) and self._idle:
            self._apply_now(commit, times)
        else:
            self._answers[commit.lease.lease_id] = self._enqueue(lambda: self._apply(commit, times))

    @property
    def _idle(self) -> bool:
        """Whether nothing is queued or under way, so that this thread may do what belongs between two commits."""
        return not self._busy and self._queue.empty() and not self._closed

    def _may_release_now(self, lease_ids: Sequence[str], between: bool) -> bool:
        """Whether held replies of leases are made on this thread: they must be fast too, and wait for no checkpoint."""
        leases = [self._core.leases.live[lease_id] for lease_id in lease_ids if lease_id in self._core.leases.live]
        fast = len(leases) * self._core.central.size <= INLINE_PARAMETERS
        return (between or self._idle) and fast and all(runs_inline(self._core, lease) for lease in leases)

    def awaited(self, lease: Lease, sequence: int) -> asyncio.Future[Any] | None:
        """A future of the lease's commit of that sequence; None unless it waits in the queue, is being applied, or its reply is
        held."""
        return self._answers[lease.lease_id] if lease.queued == sequence else self.held.get(lease.lease_id)

    def applied(self, lease: Lease, sequence: int) -> Applied:
        """The facts of the lease's commit of that sequence, which is not in the queue. Raises LeaseEnded if the lease ended
        before it was applied."""
        if lease.last_applied is None or lease.last_applied.sequence != sequence:
            raise LeaseEnded("the lease ended while the commit waited in the queue: register again")
        return lease.last_applied

    async def between_commits(self, plan: Callable[[], Callable[[], T]]) -> T:
        """Queues `plan`, and returns the result; see `queue`."""
        return await asyncio.shield(self.queue(plan))

    def queue(self, plan: Callable[[], Callable[[], T]]) -> asyncio.Future[T]:
        """Queues `plan`. When it reaches the head of the queue, calls it on the event loop's thread, then runs the function
        that it returned in the apply thread. The next commit waits for that."""

        async def job() -> T:
            return await self._in_thread(plan())

        return self._enqueue(job)

    async def run(self) -> None:
        """Works through the queue until it is closed. Any error except a GemError ends it, because θ can't be trusted then."""
        while await self._next():
            pass
        self._thread.shutdown()

    async def _next(self) -> bool:
        """Does the next job of the queue. Separate from `run`, so that no reference to a result is kept while it waits for the
        next."""
        entry = await self._queue.get()
        if entry is None:
            return False
        job, done = entry
        self._busy = True
        try:
            done.set_result(await job())
        except GemError as error:
            done.set_exception(error)
        except BaseException as error:
            done.set_exception(error)
            raise
        finally:
            self._busy = False
        return True

    def close(self) -> None:
        """Ends `run` once everything queued is done. Later jobs are rejected with Draining."""
        self._closed = True
        self._queue.put_nowait(None)

    def _enqueue(self, job: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        if self._closed:
            raise Draining("the server is shutting down: try again once it has restarted")
        done: asyncio.Future[T] = self._loop.create_future()
        done.add_done_callback(lambda future: future.exception())  # the caller may be gone: avoids asyncio's warning
        self._queue.put_nowait((job, done))
        self._loop.wake()
        return done

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _apply(self, commit: Commit, times: CommitTimes) -> Applied:
        try:
            step = self._core.begin(commit)
            times.rule_began = self._clock()
            pi = step.run() if runs_inline(self._core, commit.lease) else await self._in_thread(step.run)
            return self._finish(step, pi, times)
        finally:
            commit.lease.queued = None
            commit.upload.release()
            del self._answers[commit.lease.lease_id]

    def _apply_now(self, commit: Commit, times: CommitTimes) -> None:
        times.rule_began = times.queued
        try:
            step = self._core.begin(commit)
            self._finish(step, step.run(), times)
        except RuleFailed:
            self._core.failed(commit)
            raise
        except BaseException as error:
            self._enqueue(partial(_fail, error))  # ends `run`
            raise
        finally:
            commit.upload.release()

    def _finish(self, step: Step, pi: PiStatistics | None, times: CommitTimes) -> Applied:
        now = times.applied = self._clock()
        applied = self._core.finish(step, pi, now)
        for observe in self._observers:
            observe(applied, times)
        if self._core.settings.reply_wait:
            self.held.applied(step, now)
        return applied


async def _fail(error: BaseException) -> None:
    raise error


def runs_inline(core: Core, lease: Lease) -> bool:
    """Whether a commit may be applied on the event loop's thread: it must be fast, and must not wait for a checkpoint. A commit
    that may have to wait runs in the apply thread, because the checkpoint itself needs the event loop."""
    return core.central.size <= INLINE_PARAMETERS and lease.before_change is None


async def run_blocking(work: Callable[[], T], parameters: int) -> T:
    """Runs work whose time grows with the number of parameters: at once if they are few, otherwise in a thread, so that the
    event loop stays free."""
    return work() if parameters <= INLINE_PARAMETERS else await asyncio.to_thread(work)
