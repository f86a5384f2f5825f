"""When checkpoints are written: on an interval, on request, and at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gem_api.errors import CheckpointFailed
from gem_api.logs import Logger

from gem_server.apply_loop import ApplyLoop
from gem_server.core import Core
from gem_server.durability.journal import Journal
from gem_server.durability.recovery import plan_checkpoint
from gem_server.progress import Progress

_TICK_SECONDS = 0.2


class Checkpointer:
    """Writes checkpoints between two commits.

    Args:
        directory: Where to, or None for nowhere.
        keep: How many to keep.
        core: What to write.
        apply_loop: Gives the turn between two commits.
        progress: Told of each checkpoint.
        clock: Monotonic seconds.
        log: The server's log.
        before: Called before each one is written.
        journal: The log that goes on where a checkpoint ends, if one is kept.
        log_limit: Bytes of log after which a checkpoint is written, so that the log before it can go.

    Attributes:
        told: Called after each one is written.
    """

    def __init__(
        self,
        directory: Path | None,
        keep: int,
        core: Core,
        apply_loop: ApplyLoop,
        progress: Progress,
        clock: Callable[[], float],
        log: Logger,
        before: Callable[[], None] = lambda: None,
        journal: Journal | None = None,
        log_limit: int = 0,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._core = core
        self._apply_loop = apply_loop
        self._progress = progress
        self._clock = clock
        self._log = log
        self._before = before
        self._journal = journal
        self._log_limit = log_limit
        self.told: Callable[[], None] = lambda: None

    async def write(self) -> tuple[int, Path]:
        """Writes one at the next turn; returns its version and folder. Raises CheckpointFailed."""
        self._require_possible()
        return self._written(*await self._apply_loop.between_commits(self._plan))

    async def write_last(self) -> None:
        """Writes one after the last commit, if there is anything to write and anywhere to write it. Raises CheckpointFailed."""
        if self._directory is not None and self._core.central.initialized:
            self._written(*await asyncio.to_thread(self._plan()))

    async def every(self, seconds: float) -> None:
        """Writes one as soon as θ has a value, so that a run never begins anew, and then every so often while there are new
        commits. A failure is logged and tried again next time."""
        tick = min(seconds, _TICK_SECONDS)
        passed = seconds
        while True:
            await asyncio.sleep(tick)
            passed += tick
            if not self._core.central.initialized or (passed < seconds and not self._log_is_long):
                continue
            passed = 0.0
            if self._core.central.version != self._progress.checkpoint_version:
                try:
                    await self.write()
                except CheckpointFailed as error:
                    self._log.error("checkpoint failed; the previous one stands", why=str(error))

    @property
    def _log_is_long(self) -> bool:
        return self._journal is not None and self._journal.size > self._log_limit

    def write_first(self) -> None:
        """Before the server serves: one of what was recovered, for the log to follow. Raises CheckpointFailed."""
        self._written(*self._plan()())

    def _plan(self) -> Callable[[], tuple[int, Path]]:
        directory = self._directory
        assert directory is not None
        self._before()
        version, write = self._core.central.version, plan_checkpoint(self._core, directory, self._keep, self._journal)

        def work() -> tuple[int, Path]:
            try:
                return version, write()
            except OSError as error:
                raise CheckpointFailed(f"could not write to {directory}: {error}") from error

        return work

    def _written(self, version: int, path: Path) -> tuple[int, Path]:
        self._progress.checkpointed(version, self._clock())
        self.told()
        self._log.info("checkpoint written", version=version, path=str(path))
        return version, path

    def _require_possible(self) -> None:
        if self._directory is None:
            raise CheckpointFailed("the server was started without --checkpoint-dir")
        if not self._core.central.initialized:
            raise CheckpointFailed("the central variable has no value yet: there is nothing to write")
