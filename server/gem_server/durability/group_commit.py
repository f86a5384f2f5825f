"""Group commit: a thread writes the log to the disk, and replies to clients wait until their records are there."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from gem_api.errors import CheckpointFailed, Overloaded
from gem_api.process.logs import Logger

from gem_server.durability.journal import Journal
from gem_server.event_loop import running_loop

RETRY_SECONDS = 1.0
MAX_SYNCS = 2  # syncs in parallel: a sync takes long even if it has little to write
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Durability(Protocol):
    """What a servicer waits for before it replies."""

    async def begin(self) -> None:
        """Call this when θ has its first value. Returns once that is saved. Raises Overloaded if it can't be saved now."""

    def require_writable(self) -> None:
        """Raises Overloaded while no commit can be acknowledged."""

    def awaited(self, number: int) -> asyncio.Future[None] | None:
        """A future that is done once the record of that number is on the disk; None if it is there. Raises Overloaded, or the
        future does, if it can't be written now."""

    async def reached(self, number: int) -> None:
        """Returns once the record of that number is on the disk. Raises Overloaded if it can't be written now."""

    async def settled(self) -> None:
        """Returns once every record so far is on the disk. Raises Overloaded if they can't be written now."""


class Unlogged:
    """A server without a log: waits for nothing."""

    async def begin(self) -> None: ...

    def require_writable(self) -> None: ...

    def awaited(self, number: int) -> None:
        return None

    async def reached(self, number: int) -> None: ...

    async def settled(self) -> None: ...


class GroupCommit:
    """Writes a journal in the background; used under the event loop's lock.

    A full disk stops acknowledgements, not the server: records stay in memory, and are written once there is room. Any other
    disk error ends `run`: it is then unknown what reached the disk, until the next start reads it.

    Args:
        journal: The log to write.
        logger: The server's logger.
        clock: Returns monotonic seconds.
        flushed: Called with the seconds that a group of records took.
        checkpoint: Writes the checkpoint that the log follows. Raises CheckpointFailed.
    """

    def __init__(
        self,
        journal: Journal,
        logger: Logger,
        clock: Callable[[], float],
        flushed: Callable[[float], None],
        checkpoint: Callable[[], Awaitable[object]],
    ) -> None:
        self.journal = journal
        self._logger = logger
        self._clock = clock
        self._flushed = flushed
        self._checkpoint = checkpoint
        self._loop = running_loop()
        self._based = asyncio.Event()
        self._work = asyncio.Event()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(1 + MAX_SYNCS, "log")
        # The written groups: last number, a future that is done when it is synced, and when it began. `_acknowledge` holds one
        # more.
        self._syncs: asyncio.Queue[tuple[int, asyncio.Future[None], float]] = asyncio.Queue(MAX_SYNCS - 1)

    def based(self) -> None:
        """Call this when a checkpoint is complete: the log may now be written, as it follows that checkpoint."""
        self._based.set()
        self._well()

    async def begin(self) -> None:
        try:
            await self._checkpoint()
        except CheckpointFailed as error:
            self._refuse(f"can't write the run's first checkpoint ({error}): free disk space, commits wait until then")
            self.require_writable()

    def require_writable(self) -> None:
        if self.journal.trouble:
            raise Overloaded(self.journal.trouble)

    def awaited(self, number: int) -> asyncio.Future[None] | None:
        if number <= self.journal.durable:
            return None
        self.require_writable()
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((number, done))
        self._work.set()
        self._loop.wake()
        return done

    async def reached(self, number: int) -> None:
        awaited = self.awaited(number)
        if awaited is not None:
            await awaited

    async def settled(self) -> None:
        await self.reached(self.journal.appended)

    async def run(self) -> None:
        """Writes group after group. Raises OSError if the disk fails."""
        try:
            await self._based.wait()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._acknowledge())
                while True:
                    await self._work.wait()
                    self._work.clear()
                    await self._write()
        except* OSError as errors:
            error = errors.exceptions[0]
            self._logger.error("can't write the log", why=str(error))
            raise error from None
        finally:
            self._stop(Overloaded("the server is shutting down: try again once it has restarted"))

    def close(self) -> None:
        self._threads.shutdown()
        self.journal.close()

    async def _write(self) -> None:
        batch, began = self.journal.take(), self._clock()
        if not batch:
            return
        if self.journal.begins_segment(batch):
            await self._syncs.join()
        try:
            await self._in_thread(partial(self.journal.write, batch))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            await self._wait_for_room(error)
            return
        self.journal.written(batch)
        self._work.set()  # there may be more, of the next segment
        await self._syncs.put((batch[-1].number, self._in_thread(self.journal.sync), began))

    async def _acknowledge(self) -> None:
        """Acknowledges records in order: a later sync that succeeds says nothing about an earlier one that failed."""
        while True:
            number, synced, began = await self._syncs.get()
            await synced
            self.journal.done(number)
            self._well()
            self._flushed(self._clock() - began)
            while self._waiters and self._waiters[0][0] <= number:
                _resolve(self._waiters.popleft()[1])
            self._syncs.task_done()

    def _in_thread(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _wait_for_room(self, error: OSError) -> None:
        self._refuse(f"the disk of the server's log is full ({error.strerror}): free disk space there, commits wait until then")
        await asyncio.sleep(RETRY_SECONDS)
        self._work.set()

    def _refuse(self, trouble: str) -> None:
        if not self.journal.trouble:
            self._logger.error("the disk is full: no commit is acknowledged until there is room", why=trouble)
        self.journal.trouble = trouble
        self._stop(Overloaded(trouble))

    def _well(self) -> None:
        if self.journal.trouble:
            self._logger.info("the disk has room again: commits are acknowledged")
            self.journal.trouble = ""

    def _stop(self, error: Overloaded) -> None:
        while self._waiters:
            _resolve(self._waiters.popleft()[1], error)


def _resolve(waiter: asyncio.Future[None], error: Overloaded | None = None) -> None:
    if waiter.done():
        return  # the waiting call has ended
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
