"""Whose turn it is on the network: large transfers in one direction go one or a few at a time, first come, first served.

If all workers send at once, each is slow, all are done at the same time, and then all wait for θ: half of a network is idle. In
turns, θ goes down to one while another's gradient comes up.

A client that is slow keeps what it has and goes on, but its turn ends: the next one begins. Its later transfers go beside the
others' from their beginning, until one is fast again.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gem_api.errors import Overloaded

from gem_server.intake.width import Width

T = TypeVar("T")
SMALL = 1 << 20  # bytes up to which a transfer goes beside others
LONGEST = 10.0  # seconds that a transfer waits before it begins beside others: its client must not take the server for dead
PATIENCE = 4.0  # a turn ends after this many times what it would have taken at the best rate of the last turns,
GRACE = 0.25  # and these seconds
AHEAD = 4 << 20  # bytes before the end of a transfer, at most, at which the next turn begins
IN_FLIGHT = 16 << 20  # bytes of the transfers that have a turn at the same time: one alone begins slowly on a far network
FIRST = 2.0  # seconds after which a transfer is slow while no other has shown how fast this network is
_REMEMBERED = 16  # turns


@dataclass(eq=False)
class _Turn:
    """A transfer under way, or one that waits since it was asked for."""

    client: str
    nbytes: int
    alone: bool
    began: float
    slow: bool = False
    together: int = 1  # how many had a turn when it began, with it,
    width: int = 1  # and how many might have one


class Turns(Generic[T]):
    """The turns of one direction. Its methods are called under the event loop's lock.

    Args:
        give: Returns what a transfer needs, an object of its own, or None if it has to wait for that. Its argument is how many
            slow transfers are under way. May raise Overloaded.
        take_back: Takes it back from a transfer that nobody begins.
        loop: Makes the futures that calls wait for.
        clock: Returns monotonic seconds.
        workers: Returns how many there are. At most half of them have a turn, so that the others use the other direction.
        hurry: Called when a transfer has to wait.
        small: Bytes up to which a transfer goes beside others.
    """

    def __init__(
        self,
        give: Callable[[int], T | None],
        take_back: Callable[[T], None],
        loop: AbstractEventLoop,
        clock: Callable[[], float],
        workers: Callable[[], int],
        hurry: Callable[[], None] = lambda: None,
        small: int = SMALL,
    ) -> None:
        self._give = give
        self._take_back = take_back
        self._loop = loop
        self._clock = clock
        self._workers = workers
        self._hurry = hurry
        self._small = small
        self._turns: dict[T, _Turn] = {}
        self._waiting: deque[tuple[Future[T], _Turn]] = deque()
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)  # of the last turns, in seconds a byte
        self._slow: set[str] = set()
        self._width = Width()

    def begin(self, client: str, nbytes: int, nearby: bool = False) -> T | Future[T]:
        """What a client's transfer of so many bytes needs, or what to wait for before. Call `end` with it once the transfer is
        over, or nearly. A client that is `nearby`, on this machine, takes nothing from the network. Raises Overloaded."""
        slow = client in self._slow
        turn = _Turn(client, nbytes, nbytes > self._small and not nearby and not slow, self._clock(), slow)
        if (not self._waiting or slow) and (given := self._give_to(turn)) is not None:
            return given
        due: Future[T] = self._loop.create_future()
        self._waiting.append((due, turn))
        self._hurry()
        return due

    def give_up(self, due: Future[T]) -> None:
        """Call this if nobody waits for a turn any longer."""
        if not due.done():
            due.cancel()
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not due)
        elif not due.cancelled() and due.exception() is None:
            self._take_back(due.result())
            self._turns.pop(due.result(), None)
            self.serve()

    def nearly(self, given: T, nbytes: int) -> Callable[[int], None]:
        """What to call with the bytes of each piece of a transfer of `nbytes`, from any thread. Ends the turn a little before
        the end: the next client's bytes are under way for half a round trip."""
        left, turn = nbytes - min(AHEAD, nbytes // 4), self._turns.get(given)
        if turn is None or not turn.alone:
            return lambda size: None

        def count(size: int) -> None:
            nonlocal left
            before, left = left, left - size
            if before > 0 >= left:
                self._loop.call_soon_threadsafe(self.end, given)

        return count

    def end(self, given: T) -> None:
        """Ends a turn, if it has not ended."""
        turn = self._turns.pop(given, None)
        if turn is None:
            return
        took = self._clock() - turn.began
        if turn.alone:
            self._paces.append(took / turn.nbytes)
            self._width.ended(turn.width, turn.together, self._paces[-1])
        if took > self._limit(turn):
            self._slow.add(turn.client)
        else:
            self._slow.discard(turn.client)
        self.serve()

    def pass_over(self) -> None:
        """Ends the turns of slow clients while others wait, and any turn if one waits for too long. Call it often."""
        if not self._waiting:
            return
        now = self._clock()
        overdue = now - self._waiting[0][1].began > LONGEST
        for turn in self._turns.values():
            turn.slow = turn.slow or overdue or now - turn.began > self._limit(turn)
        self.serve()

    def forget(self, client: str) -> None:
        """Call this when a client has left."""
        self._slow.discard(client)

    def serve(self) -> None:
        """Begins the transfers whose turn it is. Call it when `give` may have something again."""
        while self._waiting:
            due, turn = self._waiting[0]
            try:
                given = self._give_to(turn)
            except Overloaded as error:
                self._waiting.popleft()[0].set_exception(error)
                continue
            if given is None:
                return
            self._waiting.popleft()
            due.set_result(given)

    def _limit(self, turn: _Turn) -> float:
        """Seconds after which a transfer is slow."""
        paced = turn.nbytes > self._small and self._paces
        return PATIENCE * min(self._paces) * turn.nbytes + GRACE if paced else FIRST

    def _give_to(self, turn: _Turn) -> T | None:
        """What a transfer needs, if it may begin; None if it has to wait."""
        have_one = sum(other.alone and not other.slow for other in self._turns.values())
        if turn.alone:
            width = self._width.at_least(max(1, IN_FLIGHT // turn.nbytes))
            if have_one >= max(1, min(width, self._workers() // 2)):
                return None
        given = self._give(turn.slow + sum(other.slow for other in self._turns.values()))
        if given is not None:
            turn.began, turn.together, turn.width = self._clock(), have_one + 1, self._width.now
            self._turns[given] = turn
        return given
