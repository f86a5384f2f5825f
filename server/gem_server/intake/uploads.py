"""Where gradients arrive: hands out the buffers, and the turns to fill them."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

from gem_api.layout import Vector

from gem_server.core.memory_budget import Memory
from gem_server.core.uploads import Upload
from gem_server.intake.turns import SMALL, Turns


class Uploads(Turns[Upload]):
    """The turns of gradients, each with memory to arrive in. An upload is to be released besides: see `Upload`.

    Args:
        memory: Counts the buffers, and has them made.
        loop, clock, workers, hurry, small: As for `Turns`.
    """

    def __init__(
        self,
        memory: Memory,
        loop: AbstractEventLoop,
        clock: Callable[[], float],
        workers: Callable[[], int],
        hurry: Callable[[], None] = lambda: None,
        small: int = SMALL,
    ) -> None:
        super().__init__(self._new, Upload.release, loop, clock, workers, hurry, small)
        self._memory = memory
        self._free: list[Vector] = []

    def trim(self) -> None:
        """Frees memory that a run with so few workers does not need. Call it when a lease has ended."""
        while self._free and self._memory.uploads > self._memory.usual_uploads:
            self._memory.give_back(self._free.pop())
        self.serve()

    def _new(self, slow: int) -> Upload | None:
        memory = self._free.pop() if self._free else self._memory.take_upload(slow)
        return None if memory is None else Upload(memory, self._freed)

    def _freed(self, upload: Upload) -> None:
        self._free.append(upload.gradient)
        self.trim()
