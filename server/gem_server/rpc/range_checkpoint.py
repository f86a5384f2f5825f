"""A range's part in a checkpoint over all ranges: it holds commits back, waits for the cut, writes, and keeps the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gem_api.errors import CheckpointFailed, InvalidRequest

from gem_server.core.state_machine import Core
from gem_server.durability.checkpointer import Checkpointer, Written
from gem_server.durability.manifest import Entry, Manifest
from gem_server.intake.commit_path import CommitPath
from gem_server.intake.hold import HOLD_SECONDS

NOT_RANGED = "this server holds all of the model: CreateCheckpoint alone writes its checkpoint"
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, eq=False)
class RangeCheckpoint:
    """The three steps, as `AdminService` has them: `begin`, `write` and `write_manifest`.

    Attributes:
        core: The range.
        path: Holds commits back.
        checkpointer: Writes the checkpoint.
    """

    core: Core
    path: CommitPath
    checkpointer: Checkpointer

    async def begin(self) -> dict[str, int]:
        """Holds commits back from now on. A checkpoint that is being written is finished before.

        Returns:
            Lease id to the largest sequence number of its commits that has a ticket.

        Raises:
            InvalidRequest: This server holds everything.
            CheckpointFailed: No checkpoint can be written now, or one over all ranges is in progress.
            Draining: The server is shutting down.
        """
        self._require_ranged()
        self.path.require_open()
        self.checkpointer.require_possible()
        await self.checkpointer.idle()
        self.path.require_open()
        return self.path.begin_hold()

    async def write(self, cut: Mapping[str, int]) -> Written:
        """Writes a checkpoint that has every commit of the cut and no later one. Commits go on once it is copied or has
        failed.

        Args:
            cut: Lease id to sequence number, for all leases of all ranges.

        Raises:
            InvalidRequest: This server holds everything.
            CheckpointFailed: No commits are held back for this cut, it was not reached in time, or writing failed.
        """
        self._require_ranged()
        hold = self.path.hold.active
        self.path.release_up_to(cut)
        try:
            return await self.checkpointer.write(self._once_reached(hold))
        finally:
            self.path.end_hold(hold)

    @asynccontextmanager
    async def _once_reached(self, hold: int) -> AsyncIterator[None]:
        """The time to copy the range: the cut is reached, and later commits wait."""
        missing = self.path.hold.missing(self.core.leases)
        while missing and self.path.hold.active == hold:
            await asyncio.sleep(_LOOK_SECONDS)
            missing = self.path.hold.missing(self.core.leases) or (missing if self.path.hold.active != hold else [])
        if self.path.hold.active != hold:
            late = ", ".join(sorted(lease.worker for lease in missing)[:5])
            raise CheckpointFailed(
                f"commits were held back for {HOLD_SECONDS:.0f} s, and no checkpoint could be copied by then "
                f"({f'commits of {late} did not arrive' if late else 'the server was busy'}): try again"
            )
        yield
        self.path.end_hold(hold)

    async def write_manifest(self, ranges: Sequence[Entry], cut: Mapping[str, int], complete: bool) -> Path:
        """Writes down which checkpoints of all ranges belong together. `complete`: the lead has done so.

        Raises:
            InvalidRequest: This server holds everything, or the entries are not those of all ranges.
            CheckpointFailed: Its own checkpoint is not there, or the file can't be written.
        """
        self._require_ranged()
        part = self.core.part
        if len(ranges) != part.count:
            raise InvalidRequest(f"the manifest names {len(ranges)} ranges, but the model has {part.count}")
        manifest = Manifest(self.core.run_id, dict(cut), tuple(ranges))
        return await self.checkpointer.write_manifest(manifest, part.index, complete)

    @property
    def held_back(self) -> int:
        """The number of commits that wait, and will be applied."""
        return len(self.path.hold.waiting)

    def _require_ranged(self) -> None:
        if self.core.part.whole:
            raise InvalidRequest(NOT_RANGED)
