"""Buffers for arriving gradients, and the turns to fill them."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable

from gem_api.errors import Overloaded
from gem_api.layout import Vector

from gem_server.core.memory_budget import Memory
from gem_server.core.uploads import Arrival, Upload, gives_way
from gem_server.intake.turns import LONGEST, SMALL, Turn, Turns


class Uploads(Turns[Upload]):
    """The turns of gradients, each with memory to arrive in. An upload is to be released besides: see `Upload`.

    If there is room for more than one gradient, one buffer is never a slow client's: fast ones go on in it. A client that has
    waited for memory for too long is told to repeat its commit, and keeps its place in the order of those that wait.

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
        super().__init__(self._new, self._drop, loop, clock, workers, hurry, small)
        self._memory = memory
        self._free: list[Vector] = []
        self._arriving: dict[Upload, Arrival] = {}
        self._short: set[bool] = set()  # who waits for memory: slow clients (True), others (False)

    @property
    def waiting_for_memory(self) -> int:
        """Gradients that can't begin to arrive for lack of memory."""
        return sum(turn.slow in self._short for _, turn in tuple(self._waiting))

    @property
    def longest_wait(self) -> float:
        """Seconds for which one of those has waited; 0 if none does."""
        return max((self._clock() - turn.began for _, turn in self._waiting if turn.slow in self._short), default=0.0)

    def count_bytes(self, slot: Upload, nbytes: int) -> Callable[[int], None]:
        """As `Turns.count_bytes`; also notes how the gradient grows."""
        count, arrival = super().count_bytes(slot, nbytes), self._arriving.get(slot)
        if arrival is None:
            return count

        def grown(size: int) -> None:
            arrival.grown(size, self._clock())
            count(size)

        return grown

    def end(self, slot: Upload) -> None:
        """Call this once the gradient is complete, or nothing more of it comes."""
        arrival = self._arriving.pop(slot, None)
        super().end(slot)
        if arrival is not None and arrival.lease_id and self._took_long(arrival):
            self._slow.add(arrival.lease_id)

    def end_slow_turns(self) -> None:
        """As `Turns.end_slow_turns`. Tells clients that have waited for memory for too long to repeat their commits."""
        now = self._clock()
        for arrival in self._arriving.values():
            if arrival.slow_since is None and self._took_long(arrival):
                arrival.slow_since = now
        super().end_slow_turns()
        for waiting in tuple(self._waiting):
            due, turn = waiting
            if turn.slow in self._short and now - turn.began > LONGEST:
                self._waiting.remove(waiting)
                if turn.client:
                    self._places[turn.client] = turn.place
                due.set_exception(
                    Overloaded(
                        f"no memory for this gradient was free for {LONGEST:.0f} s: the server waits for slow workers or for "
                        "its disk; try again later"
                    )
                )

    def to_end(self) -> str | None:
        """The lease whose upload has to end, so that another has its memory; None if there is none. It is returned once."""
        if not self.waiting_for_memory or any(arrival.ending for arrival in self._arriving.values()):
            return None
        nbytes = sum(arrival.nbytes for arrival in self._arriving.values() if arrival.slow_since is not None)
        reserve_taken = False in self._short and self._memory.most_uploads > 1 and nbytes >= self._memory.uploads
        arrival = gives_way(self._arriving.values(), self._clock(), reserve_taken)
        if arrival is None:
            return None
        arrival.ending = True
        return arrival.lease_id

    def forget(self, client: str) -> None:
        """Call this when a lease has ended, and its calls are being ended."""
        super().forget(client)
        for arrival in self._arriving.values():
            if arrival.lease_id == client:
                arrival.lease_id, arrival.ending = "", True

    def serve(self) -> None:
        self._short.clear()
        super().serve()

    def trim(self) -> None:
        """Frees memory that a run with so few workers does not need. Call it when a lease has ended."""
        while self._free and self._memory.uploads > self._memory.usual_uploads:
            self._memory.give_back(self._free.pop())
        self.serve()

    def _new(self, turn: Turn) -> Upload | None:
        memory = self._memory_for(turn)
        if memory is None:
            self._short.add(turn.slow)
            return None
        upload, now = Upload(memory, self._freed), self._clock()
        self._arriving[upload] = Arrival(turn.client, memory.nbytes, now, now if turn.slow else None)
        return upload

    def _memory_for(self, turn: Turn) -> Vector | None:
        slow = sum(arrival.slow_since is not None for arrival in self._arriving.values())
        if turn.slow and slow + 1 >= max(2, self._memory.most_uploads):
            return None  # the last buffer is kept for others
        if self._free:
            return self._free.pop()
        slow_turns = sum(other.slow for other in self._turns.values())
        return self._memory.take_upload(max(slow, slow_turns) + turn.slow)

    def _took_long(self, arrival: Arrival) -> bool:
        return self._clock() - arrival.began > self._limit(arrival.nbytes)

    def _drop(self, upload: Upload) -> None:
        self._arriving.pop(upload, None)
        upload.release()

    def _freed(self, upload: Upload) -> None:
        self._free.append(upload.gradient)
        self.trim()
