"""Group commit: threads write the log to the disk, and replies to clients wait until their records are there. `write_order.py`
has the decisions."""

from __future__ import annotations

import asyncio
import errno
import math
import threading
from collections.abc import Awaitable, Callable, Iterable

from gem_api.errors import CheckpointFailed, Overloaded
from gem_api.process.logs import Logger

from gem_server.background import new_thread
from gem_server.durability.journal import Journal, Stall
from gem_server.durability.log_file import LogFile
from gem_server.durability.storage import FULL, NoRoom
from gem_server.durability.write_order import Group, WriteOrder
from gem_server.event_loop import running_loop

RETRY_SECONDS = 1.0
REMIND_SECONDS = 60.0  # between two log lines about the same stall
THREADS = 2  # that write the log, each with a sync of its own


class Durability:
    """The log as a servicer waits for it before it replies. This one is of a server without a log: it waits for nothing."""

    @property
    def stall(self) -> Stall | None:
        """The reason why no commit can be acknowledged at present; None if all is well."""
        return None

    async def begin(self) -> None:
        """Call this when θ has its first value. Returns once that is saved. Raises Overloaded if it can't be saved now."""

    def require_writable(self) -> None:
        """Raises Overloaded while no commit can be acknowledged."""

    def awaited(self, number: int) -> asyncio.Future[None] | None:
        """A future that is done once the record of that number is on the disk; None if it is there. Raises Overloaded, or the
        future does, if it can't be written now."""
        return None

    def hurry(self) -> None:
        """Has records written soon, though nobody waits for them: what they hold is needed."""

    async def settled(self) -> None:
        """Returns once every record so far is on the disk. Raises Overloaded if they can't be written now."""


class GroupCommit(Durability):
    """Writes a journal on threads of its own. Its methods are called under the event loop's lock.

    A thread writes what has collected, as one group, and syncs it. Meanwhile another thread writes the next group, so that two
    syncs are under way: a sync takes long even if it has little to write. Groups are written and acknowledged in order: a later
    sync that succeeds says nothing about an earlier one that failed.

    A full disk stops acknowledgements, not the server: records stay in memory, and are written once there is room. Any other
    disk error ends `run`: it is then unknown what reached the disk, until the next start reads it.

    Args:
        journal: The log to write.
        file: Where it is written.
        logger: The server's logger.
        clock: Returns monotonic seconds.
        flushed: Called with the seconds that a group of records took.
        checkpoint: Writes the checkpoint that the log follows. Raises CheckpointFailed.
    """

    def __init__(
        self,
        journal: Journal,
        file: LogFile,
        logger: Logger,
        clock: Callable[[], float],
        flushed: Callable[[float], None],
        checkpoint: Callable[[], Awaitable[object]],
    ) -> None:
        self.journal = journal
        self._file = file
        self._order: WriteOrder[asyncio.Future[None]] = WriteOrder(journal)
        self._logger = logger
        self._clock = clock
        self._flushed = flushed
        self._checkpoint = checkpoint
        self._loop = running_loop()
        self._changed = threading.Condition(self._loop.lock)
        self._turn_to_write = threading.Lock()
        self._closed = False
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # `run` may have ended
        self._stall_logged_at = -math.inf
        self._threads = [new_thread(f"log-{n}", self._work, self._fail) for n in range(THREADS)]

    def base_checkpoint_written(self) -> None:
        """Call this when a checkpoint is complete: the log may now be written, as it follows that checkpoint."""
        if not self._order.based:
            self._report_recovery()  # the first checkpoint could not be written
        _resolve(self._order.base_written())
        self._changed.notify_all()

    async def begin(self) -> None:
        self._order.begin()
        try:
            await self._checkpoint()
        except CheckpointFailed as error:
            why = f"can't write the run's first checkpoint ({error}): commits wait until it is written"
            self._stall_commits(why, 0, self._file.free())
            self.require_writable()

    @property
    def stall(self) -> Stall | None:
        return self.journal.stall

    def require_writable(self) -> None:
        if self.journal.stall is not None:
            raise Overloaded(self.journal.stall.why)

    def awaited(self, number: int) -> asyncio.Future[None] | None:
        if not self._order.awaits(number):
            return None
        self.require_writable()
        done: asyncio.Future[None] = self._loop.create_future()
        self._order.wait(number, done)
        self._changed.notify_all()
        return done

    def hurry(self) -> None:
        self._changed.notify_all()

    async def settled(self) -> None:
        awaited = self.awaited(self.journal.appended)
        if awaited is not None:
            await awaited

    async def finished(self) -> None:
        """As `settled`, at the end. Returns at once if no checkpoint was completed that the log could follow: nothing was
        acknowledged then, and the last checkpoint will hold it all."""
        if self._order.based:
            await self.settled()

    async def run(self) -> None:
        """Writes group after group until it is cancelled. Raises OSError if the disk fails, and whatever else ends a thread."""
        for thread in self._threads:
            thread.start()
        try:
            await self._failed
        finally:
            self._closed = True
            self._changed.notify_all()
            _resolve(self._order.dismiss(), Overloaded("the server is shutting down: try again once it has restarted"))

    async def close(self) -> None:
        """Ends the threads, and closes the file."""
        self._closed = True
        self._changed.notify_all()
        await asyncio.to_thread(self._join)
        self._file.close()

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # -- on the threads

    def _work(self) -> None:
        while (written := self._write_next()) is not None:
            self._file.sync()
            self._acknowledge(*written)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._failed.done():
                self._failed.set_exception(error)
            self._loop.wake()

    def _write_next(self) -> tuple[Group, float] | None:
        """Waits for records, and writes them as one group. Returns it with the time at which writing began; None at the end."""
        with self._turn_to_write:
            while True:
                with self._changed:
                    group, began = self._next_group(), self._clock()
                if group is None:
                    return None
                try:
                    self._file.write(group)
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    self._wait_for_room(error)
                    continue
                with self._changed:
                    self._order.written(group)
                return group, began

    def _next_group(self) -> Group | None:
        """Waits for records that may be written; None at the end."""
        while not self._closed:
            if (group := self._order.ready()) is not None:
                return group
            self._changed.wait()
        return None

    def _acknowledge(self, group: Group, began: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order.is_next(group) or self._closed)
            if not self._order.is_next(group):
                return
            self._report_recovery()
            released = self._order.acknowledge(group)
            self._flushed(self._clock() - began)
            _resolve(released)
            self._changed.notify_all()
            self._loop.wake()

    def _wait_for_room(self, error: OSError) -> None:
        # "No space left on device" would be untrue: a segment takes much at a time, of which there is some.
        cause = "" if error.errno == errno.ENOSPC else f" ({error.strerror})"
        why = f"too little room on the disk of the server's log{cause}: free space there, commits wait until then"
        needed, free = error.nbytes if isinstance(error, NoRoom) else 0, self._file.free()
        with self._changed:
            self._stall_commits(why, needed, free)
            self._loop.wake()
            self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)

    def _stall_commits(self, why: str, needed: int, free: int) -> None:
        now, stall = self._clock(), self.journal.stall
        self.journal.stall = stall = Stall(why, stall.since if stall else now, needed, free)
        if now - self._stall_logged_at >= REMIND_SECONDS:
            self._stall_logged_at = now
            self._logger.error(
                "no commit is acknowledged until there is room on the disk", why=why, seconds=round(now - stall.since),
                needed_mib=needed >> 20 or "unknown", free_mib=free >> 20,
            )  # fmt: skip
        _resolve(self._order.dismiss(), Overloaded(why))

    def _report_recovery(self) -> None:
        if self.journal.stall is not None:
            self._logger.info("the disk has room again: commits are acknowledged")
            self._stall_logged_at = -math.inf


def _resolve(waiters: Iterable[asyncio.Future[None]], error: Overloaded | None = None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue  # the waiting call has ended
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
