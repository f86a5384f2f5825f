"""Has checkpoints written: on an interval, on request, and at the end."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

from gem_api.checkpoint import STATE, TENSORS
from gem_api.errors import CheckpointFailed
from gem_api.process.files import advice
from gem_api.process.logs import Logger

from gem_server.apply_loop import ApplyLoop
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint
from gem_server.durability.capture import Capture, copies_at_most
from gem_server.durability.journal import Journal
from gem_server.durability.recovery import capture, save
from gem_server.durability.scratch import Scratch
from gem_server.durability.storage import DISK, Storage
from gem_server.telemetry.progress import Progress

_TICK_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
_NO_FOLDER = "the server was started without --checkpoint-dir"
_NO_MEMORY = "not enough memory for a copy of the model"
T = TypeVar("T")


class Written(NamedTuple):
    """A checkpoint on the disk: the version of θ in it, its folder, and the SHA-256 of its state.json."""

    version: int
    path: Path
    sha256: bytes


class InThread(Protocol):
    """Runs work in a thread."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(eq=False)
class Checkpointer:
    """Writes checkpoints of the state between two commits.

    Attributes:
        directory: The folder for checkpoints; None if none are written.
        keep: How many to keep.
        core: What to write.
        apply_loop: Runs the capture between two commits.
        progress: Records the last checkpoint, and counts those that failed.
        clock: Monotonic seconds.
        logger: The server's logger.
        before_write: Called before each one is written, in the thread that writes it.
        after_write: Called after each one is written.
        journal: The write-ahead log that continues where a checkpoint ends; None if there is none.
        log_limit: Bytes of log after which a checkpoint is written, so that older parts of the log can be removed.
        storage: The file operations.
        in_thread: Runs work that takes long, or waits for the disk, outside the event loop.
    """

    directory: Path | None
    keep: int
    core: Core
    apply_loop: ApplyLoop
    progress: Progress
    clock: Callable[[], float]
    logger: Logger
    before_write: Callable[[], None] = lambda: None
    after_write: Callable[[], None] = lambda: None
    journal: Journal | None = None
    log_limit: int = 0
    storage: Storage = DISK
    in_thread: InThread = asyncio.to_thread
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def write(self) -> Written:
        """Writes a checkpoint while commits go on. Raises CheckpointFailed."""
        self.require_possible()
        writing = asyncio.ensure_future(self._write())
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
        return await asyncio.shield(writing)  # a capture must be closed even if the caller is cancelled

    async def _write(self) -> Written:
        async with self._one_at_a_time:
            try:
                scratch = await self._prepared()
                with ExitStack() as captures:
                    captured = await self.apply_loop.between_commits(partial(self._plan, captures, scratch))
                    written = await self.in_thread(partial(self._save, captured))
            except CheckpointFailed:
                self.progress.checkpoint_failures += 1
                raise
            return self._note(written)

    async def write_last(self) -> None:
        """Writes the last checkpoint, if θ has a value and there is a folder for it. Raises CheckpointFailed."""
        if self.directory is not None and self.core.central.initialized:
            async with self._one_at_a_time:
                with ExitStack() as captures:
                    captured = await self.in_thread(self._plan(captures))
                    captured.state.last = True
                    written = await self.in_thread(partial(self._save, captured))
                self._note(written)

    def write_now(self) -> None:
        """Writes a checkpoint before the event loop serves anything. On a full disk, a start that keeps fewer checkpoints than
        the last one removes the others first. Raises CheckpointFailed."""
        with ExitStack() as captures:
            captured = self._plan(captures)()
            written = self._save(captured, make_room=True)
        self._note(written)

    def open_files(self, path: str, opened: ExitStack) -> list[BinaryIO]:
        """Opens the files of one of the folder's checkpoints, `state.json` first; `opened` closes them. Until then they can be
        read, also if the checkpoint is removed. Raises CheckpointFailed if there is no such checkpoint."""
        try:
            if self.directory is None or Path(path) not in checkpoint.list_checkpoints(self.directory):
                raise FileNotFoundError(errno.ENOENT, "it is not one of this server's checkpoints, or was removed since")
            return [opened.enter_context((Path(path) / name).open("rb")) for name in (STATE, *TENSORS)]
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise CheckpointFailed(f"can't read {path!r}: {why}; make the server write a new one") from None

    async def every(self, seconds: float) -> None:
        """Writes a checkpoint as soon as θ has a value (with a log, `initialize_central` has written it), then one at each
        interval with new commits, when the log exceeds its limit, and as soon as the run is complete. A failure is logged and
        tried again at the next interval, or sooner if it is urgent: see `_pause`."""
        tick = min(seconds, _TICK_SECONDS)
        passed = seconds if self.journal is None else 0.0
        failed = 0  # how often in a row
        while True:
            await asyncio.sleep(tick)
            passed += tick
            if not self.core.central.initialized or passed < self._pause(seconds, failed):
                continue
            passed = 0.0
            if self.core.central.version != self.progress.checkpoint_version or self._log_is_long:
                try:
                    await self.write()
                    failed = 0
                except CheckpointFailed as error:
                    failed += 1
                    self.logger.error(f"checkpoint failed; {await self.in_thread(self.what_is_left)}", why=str(error))

    def _pause(self, seconds: float, failed: int) -> float:
        """Seconds between two checkpoints. Without a first one, with a log beyond its limit, or if the run is complete, it
        waits less, but twice as long after each failure in a row."""
        retry = min(_MAX_RETRY_SECONDS, _RETRY_SECONDS * 2.0 ** min(failed - 1, 10)) if failed else 0.0
        if self._log_is_long or self.core.complete:
            return retry
        return seconds if self.progress.checkpoint_version is not None else min(seconds, max(retry, _RETRY_SECONDS))

    def what_is_left(self) -> str:
        """Says what a failed checkpoint leaves."""
        try:
            assert self.directory is not None
            there = checkpoint.list_checkpoints(self.directory)
        except OSError as error:
            return f"whether there is an earlier one is not known ({error.strerror})"
        return "the previous one is intact" if there else "there is none yet: the model is only in memory"

    @property
    def _log_is_long(self) -> bool:
        return self.journal is not None and self.journal.size > self.log_limit

    async def _prepared(self) -> Scratch:
        """Prepares memory for the copies that commits have to wait for. Raises CheckpointFailed."""
        scratch = Scratch(self.core.central.size)
        try:
            return await self.in_thread(partial(scratch.prepare, copies_at_most(self.core)))
        except MemoryError:
            raise CheckpointFailed(_NO_MEMORY) from None

    def _plan(self, captures: ExitStack, scratch: Scratch | None = None) -> Callable[[], Capture]:
        """Captures the state; call it between two commits. `captures` closes the capture. Returns a function that copies θ."""
        captured = captures.enter_context(closing(capture(self.core, self.journal, scratch)))

        def work() -> Capture:
            try:
                captured.copy_theta()
            except MemoryError:
                raise CheckpointFailed(_NO_MEMORY) from None
            return captured

        return work

    def _save(self, captured: Capture, make_room: bool = False) -> Written:
        directory = self.directory
        assert directory is not None
        self.before_write()
        try:
            path = save(directory, captured, self.keep, self.storage, self.logger, make_room)
            return Written(captured.state.version, path, _sha256(path))
        except OSError as error:
            what = f": {what}" if (what := advice(error)) else ""
            raise CheckpointFailed(f"could not write to {directory}: {error}{what}") from error
        except MemoryError:
            raise CheckpointFailed(_NO_MEMORY) from None

    def _note(self, written: Written) -> Written:
        self.progress.checkpointed(written.version, self.clock())
        self.after_write()
        self.logger.info("checkpoint written", version=written.version, path=str(written.path))
        return written

    def require_possible(self) -> None:
        """Raises CheckpointFailed if there is no folder, or nothing to write."""
        if self.directory is None:
            raise CheckpointFailed(_NO_FOLDER)
        if not self.core.central.initialized:
            raise CheckpointFailed("the model has no parameters yet: there is nothing to write")


def _sha256(checkpoint: Path) -> bytes:
    """SHA-256 of a checkpoint's state.json. Raises OSError."""
    return hashlib.sha256((checkpoint / STATE).read_bytes()).digest()
