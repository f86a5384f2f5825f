"""Turns on the network: large transfers in one direction go one or a few at a time, first come, first served.

If all workers send at once, each is slow, all are done at the same time, and then all wait for θ: half of a network is idle. In
turns, θ goes down to one while another's gradient comes up.

A client that is slow keeps what it has and goes on, but its turn ends: the next one begins. Its later transfers go beside the
others' from their beginning, until one is fast again.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gem_api.errors import Overloaded

from gem_server.intake.width import Width

T = TypeVar("T")
SMALL = 1 << 20  # bytes up to which a transfer goes beside others
LONGEST = 10.0  # seconds that a transfer waits before it begins beside others: its client must not take the server for dead
PATIENCE = 4.0  # a turn is slow if it takes this many times what it would have taken at the best rate of the last turns
GRACE = 0.25  # seconds that a turn may take beyond that: short ones scatter
AHEAD = 4 << 20  # bytes before the end of a transfer, at most, at which the next turn begins
IN_FLIGHT = 16 << 20  # bytes of the transfers that have a turn at the same time: one alone begins slowly on a far network
FIRST = 2.0  # seconds after which a transfer is slow while no other has shown how fast this network is
_REMEMBERED = 16  # turns


@dataclass(eq=False)
class Turn:
    """A transfer under way, or one that waits.

    Attributes:
        client: Whose it is; empty once the client has left.
        nbytes: Its bytes.
        alone: Whether it goes with few others, not beside all.
        began: When it began, or was asked for.
        place: When it was asked for first. Those that wait begin in this order.
        slow: Whether it is slow, or its client's last one was.
        together: How many had a turn when it began, with it.
        width: How many might have had one.
    """

    client: str
    nbytes: int
    alone: bool
    began: float
    place: float
    slow: bool = False
    together: int = 1
    width: int = 1


class Turns(Generic[T]):
    """The turns of one direction. Its methods are called under the event loop's lock.

    Args:
        acquire: Returns what a transfer needs, an object of its own, or None if it has to wait for that. May raise Overloaded.
        release: Takes it back from a transfer that nobody begins.
        loop: Makes the futures that calls wait for.
        clock: Returns monotonic seconds.
        workers: Returns how many there are. At most half of them have a turn, so that the others use the other direction.
        hurry: Called when a transfer has to wait.
        small: Bytes up to which a transfer goes beside others.
    """

    def __init__(
        self,
        acquire: Callable[[Turn], T | None],
        release: Callable[[T], None],
        loop: AbstractEventLoop,
        clock: Callable[[], float],
        workers: Callable[[], int],
        hurry: Callable[[], None] = lambda: None,
        small: int = SMALL,
    ) -> None:
        self._acquire = acquire
        self._release = release
        self._loop = loop
        self._clock = clock
        self._workers = workers
        self._hurry = hurry
        self._small = small
        self._turns: dict[T, Turn] = {}
        self._waiting: deque[tuple[Future[T], Turn]] = deque()
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)  # of the last turns, in seconds a byte
        self._slow: set[str] = set()
        self._places: dict[str, float] = {}  # of clients that were told to ask again
        self._width = Width()

    def begin(self, client: str, nbytes: int, nearby: bool = False) -> T | Future[T]:
        """The slot that a client's transfer of `nbytes` needs, or a future of one. Call `end` with the slot once the transfer
        is over, or nearly. A client that is `nearby`, on this machine, takes nothing from the network. Raises Overloaded."""
        slow, now = client in self._slow, self._clock()
        alone = nbytes > self._small and not nearby and not slow
        turn = Turn(client, nbytes, alone, now, self._places.pop(client, now), slow)
        if not self._waiting and (slot := self._acquire_for(turn)) is not None:
            return slot
        due: Future[T] = self._loop.create_future()
        insort(self._waiting, (due, turn), key=lambda waiting: waiting[1].place)
        self.serve()
        if due.done():
            return due.result()
        self._hurry()
        return due

    def give_up(self, due: Future[T]) -> None:
        """Call this if nobody waits for a turn any longer."""
        if not due.done():
            due.cancel()
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not due)
        elif not due.cancelled() and due.exception() is None:
            self._release(due.result())
            self._turns.pop(due.result(), None)
            self.serve()

    def count_bytes(self, slot: T, nbytes: int) -> Callable[[int], None]:
        """A function to call with the bytes of each piece of a transfer of `nbytes`, from any thread. It ends the turn a little
        before the end: the next client's bytes are under way for half a round trip."""
        left, turn = nbytes - min(AHEAD, nbytes // 4), self._turns.get(slot)
        if turn is None or not turn.alone:
            return lambda size: None

        def count(size: int) -> None:
            nonlocal left
            before, left = left, left - size
            if before > 0 >= left:
                self._loop.call_soon_threadsafe(self._end_turn, slot)

        return count

    def end(self, slot: T) -> None:
        """Ends a turn, if it has not ended."""
        self._end_turn(slot)

    def _end_turn(self, slot: T) -> None:
        turn = self._turns.pop(slot, None)
        if turn is None:
            return
        took = self._clock() - turn.began
        if turn.alone:
            self._paces.append(took / turn.nbytes)
            self._width.ended(turn.width, turn.together, self._paces[-1])
        if took <= self._limit(turn.nbytes):
            self._slow.discard(turn.client)
        elif turn.client:
            self._slow.add(turn.client)
        self.serve()

    def end_slow_turns(self) -> None:
        """Ends the turns of slow clients while others wait, and any turn if one waits for too long. Call it often."""
        if not self._waiting:
            return
        now = self._clock()
        overdue = now - min(turn.began for _, turn in self._waiting) > LONGEST
        for turn in self._turns.values():
            turn.slow = turn.slow or overdue or now - turn.began > self._limit(turn.nbytes)
        self.serve()

    def forget(self, client: str) -> None:
        """Call this when a client has left. A transfer of it that still ends is not remembered."""
        self._slow.discard(client)
        self._places.pop(client, None)
        for turn in (*self._turns.values(), *(turn for _, turn in self._waiting)):
            if turn.client == client:
                turn.client = ""

    def serve(self) -> None:
        """Begins the transfers whose turn it is. Call it when `acquire` may have something again. Slow ones that have to wait
        hold up no others, nor do others hold up them."""
        stuck: set[bool] = set()
        for waiting in tuple(self._waiting):
            due, turn = waiting
            if turn.slow in stuck:
                continue
            try:
                slot = self._acquire_for(turn)
            except Overloaded as error:
                self._waiting.remove(waiting)
                due.set_exception(error)
                continue
            if slot is None:
                stuck.add(turn.slow)
            else:
                self._waiting.remove(waiting)
                due.set_result(slot)

    def _limit(self, nbytes: int) -> float:
        """Seconds after which a transfer of `nbytes` is slow."""
        paced = nbytes > self._small and self._paces
        return PATIENCE * min(self._paces) * nbytes + GRACE if paced else FIRST

    def _acquire_for(self, turn: Turn) -> T | None:
        """A slot for a transfer, if it may begin; None if it has to wait."""
        have_one = sum(other.alone and not other.slow for other in self._turns.values())
        if turn.alone:
            self._width.set_minimum(max(1, IN_FLIGHT // turn.nbytes))
            if have_one >= max(1, min(self._width.now, self._workers() // 2)):
                return None
        slot = self._acquire(turn)
        if slot is not None:
            turn.began, turn.together, turn.width = self._clock(), have_one + 1, self._width.now
            self._turns[slot] = turn
        return slot
