"""An operator's program that has each range write a checkpoint, and copies them: a backup in mid-training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from gem_ctl.backups.stores import BackupFailed
from gem_server.durability import checkpoint
from simulation.client import Request, Response
from simulation.everywhere import Everywhere
from simulation.truth import History, Known


class Backup:
    """One backup of all ranges.

    Args:
        name: Where the responses go.
        ranges: How many there are.
        folder: Where the copies go.
        random: Decides whether requests are sent again.
        truth: Is told of the backup that is complete.
        under_way: Returns the commits that not all ranges have answered.

    Attributes:
        over: Whether it is complete, or has failed.
        copies: The checkpoints of all ranges, once it is complete, each with what led to it.
    """

    def __init__(
        self, name: str, ranges: int, folder: Path, random: Random, truth: Everywhere, under_way: Callable[[], set[Known]]
    ) -> None:
        self.name = name
        self.over = False
        self.copies: list[tuple[Path, History]] = []
        self._folder, self._random, self._truth, self._under_way = folder, random, truth, under_way
        self._steps = self.order(range(ranges))
        self._at_first: set[Known] | None = None  # what was under way once the first range was copied
        self._waiting: dict[int, Request] = {}
        self._sent: set[int] = set()
        self._copied: dict[int, tuple[Path, History]] = {}
        self._next_step()

    def order(self, ranges: range) -> list[range]:
        """Which ranges are asked at the same time, in order: the leader comes first."""
        return [ranges[:1], ranges[1:]]

    def _next_step(self) -> None:
        self._waiting = {index: Request(self.name, index, "create", {}, index) for index in self._steps.pop(0)}

    def requests(self) -> list[Request]:
        """The requests to send now. Each is sent once, and seldom again."""
        new = [request for index, request in self._waiting.items() if index not in self._sent or self._random.random() < 0.02]
        self._sent |= {request.index for request in new}
        return new

    def answered(self, response: Response) -> None:
        index = response.request.index
        if self._waiting.get(index) is not response.request or self.over:
            return
        try:
            if response.error is not None:
                raise BackupFailed(str(response.error))
            written = response.value
            copy = self._folder / f"range-{index}" / written.path.name
            shutil.copytree(written.path, copy)
        except (BackupFailed, OSError):
            self.over = True  # an operator may begin another
            return
        self._copied[index] = copy, self._truth.ranges[index].history(checkpoint.read_state(copy).version)
        del self._waiting[index]
        if self._at_first is None:
            self._at_first = self._under_way()
        if not self._waiting and self._steps:
            self._next_step()
        elif not self._waiting:
            self.over, self.copies = True, [self._copied[index] for index in sorted(self._copied)]
            self._truth.backup_is_complete(self.copies, self._at_first)
