"""Whose turn it is to send a gradient: large ones arrive one at a time, in the order of their first bytes.

If all workers send at once, each is slow, all are done at the same time, and then all wait for θ: half of a network is idle. In
turns, θ goes down to some while others send. And the run needs a few buffers, instead of one for each worker.

A client that sends slowly keeps its buffer and goes on, but its turn ends: the next one begins.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gem_api.errors import Overloaded
from gem_api.layout import Vector

from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload

SMALL = 1 << 20
LONGEST = 10.0  # seconds that a gradient waits before it begins beside others: its client must not take the lane for dead
PATIENCE = 4.0  # a turn ends after this many times what the fastest of the last turns took,
GRACE = 0.25  # and these seconds
AHEAD = 4 << 20  # bytes before the end of a gradient, at most, at which the next turn begins
FIRST = 2.0  # seconds that a turn lasts while no other has shown how fast this network is
_REMEMBERED = 16  # turns


@dataclass(eq=False)
class _Turn:
    """A gradient that is arriving."""

    began: float
    slow: bool = False


class Turns:
    """Hands out the memory where gradients arrive. Its methods are called under the event loop's lock.

    Args:
        core: The state machine; its `memory` has the buffers.
        loop: Makes the futures that calls wait for.
        clock: Returns monotonic seconds.
        hurry: Called when a gradient has to wait: memory that the log holds is needed.
        small: Bytes up to which a gradient needs no turn.
    """

    def __init__(
        self,
        core: Core,
        loop: AbstractEventLoop,
        clock: Callable[[], float],
        hurry: Callable[[], None] = lambda: None,
        small: int = SMALL,
    ) -> None:
        self._hurry = hurry
        self._small = small
        self._core = core
        self._loop = loop
        self._clock = clock
        self._free: list[Vector] = []
        self._turns: dict[Upload, _Turn] = {}
        self._waiting: deque[tuple[Future[Upload], float]] = deque()  # and since when
        self._took: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self) -> Upload | Future[Upload]:
        """Memory for a gradient that is about to arrive, or what to wait for. Call `arrived` once it is there or given up, and
        `release` it at the end. Raises Overloaded if the machine has no memory left."""
        if not self._waiting and (upload := self._next()) is not None:
            return upload
        due: Future[Upload] = self._loop.create_future()
        self._waiting.append((due, self._clock()))
        self._hurry()
        return due

    def give_up(self, due: Future[Upload]) -> None:
        """Call this if nobody waits for the memory any longer."""
        if not due.done():
            due.cancel()
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not due)
        elif not due.cancelled() and due.exception() is None:
            due.result().release()
            self.arrived(due.result())

    def nearly(self, upload: Upload) -> Callable[[int], None]:
        """What to call with the number of elements of each piece of a gradient as it arrives, from any thread. Ends the turn a
        little before the end: the next client's bytes are under way for half a round trip."""
        left = upload.gradient.size - min(AHEAD, upload.gradient.nbytes // 4) // 4
        if upload not in self._turns:
            return lambda size: None

        def count(size: int) -> None:
            nonlocal left
            before, left = left, left - size
            if before > 0 >= left:
                self._loop.call_soon_threadsafe(self.arrived, upload)

        return count

    def arrived(self, upload: Upload) -> None:
        """Ends a turn, if it has not ended."""
        turn = self._turns.pop(upload, None)
        if turn is not None:
            self._took.append(self._clock() - turn.began)
            self._serve()

    def pass_over(self) -> None:
        """Ends the turns of slow clients while others wait, and any turn if one waits for too long. Call it often."""
        if not self._waiting:
            return
        now = self._clock()
        limit = PATIENCE * min(self._took) + GRACE if self._took else FIRST
        overdue = now - self._waiting[0][1] > LONGEST
        for turn in self._turns.values():
            turn.slow = turn.slow or overdue or now - turn.began > limit
        self._serve()

    def trim(self) -> None:
        """Frees memory that a run with so few workers does not need. Call it when a lease has ended."""
        memory = self._core.memory
        while self._free and memory.uploads > memory.usual_uploads:
            memory.give_back(self._free.pop())
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            try:
                upload = self._next()
            except Overloaded as error:
                self._waiting.popleft()[0].set_exception(error)
                continue
            if upload is None:
                return
            self._waiting.popleft()[0].set_result(upload)

    def _next(self) -> Upload | None:
        """Memory for the next gradient, and its turn; None if it has to wait."""
        large = 4 * self._core.central.size > self._small
        slow = sum(turn.slow for turn in self._turns.values())
        if large and len(self._turns) > slow:
            return None
        memory = self._free.pop() if self._free else self._core.memory.take_upload(slow)
        if memory is None:
            return None
        upload = Upload(memory, self._freed)
        if large:
            self._turns[upload] = _Turn(self._clock())
        return upload

    def _freed(self, upload: Upload) -> None:
        self._free.append(upload.gradient)
        self.trim()
