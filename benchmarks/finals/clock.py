"""When simulated workers commit, and when their replies are released: a pure function of a cluster's times and of what the
server does about them. No gradient is needed to know it, so a run's length in commits is known before it begins.

The server's own `Timetable`, `Shares` and `Rendezvous` decide."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gem_server.core.rendezvous import Rendezvous
from gem_server.core.shares import Shares
from gem_server.core.timetable import Timetable

from benchmarks.versus.profiles import Profile

SIZES = 16  # the samples of a whole batch
OVERHEAD = 1.5  # units that an exchange over the slow link of profile `far` takes, whatever the size of the batch


@dataclass(frozen=True)
class Policy:
    """What the server does about unequal times.

    Attributes:
        smallest: The smallest share of a batch; 1: all are whole.
        wait: How long a reply waits for commits that are expected, in steps of the worker that waits; 0: not at all.
        until: Rounds after which nobody waits any more; 0: to the end.
    """

    smallest: float = 1.0
    wait: float = 0.0
    until: float = 0.0


class Event(NamedTuple):
    """Something that the server does.

    Attributes:
        time: In units.
        worker: Who it concerns.
        size: The samples of the gradient that arrives; 0: a reply is released, or the worker joins.
        step: The worker's gradients so far.
        held: Whether the reply was held.
    """

    time: float
    worker: int
    size: int
    step: int
    held: bool = False


@dataclass
class Clock:
    """A simulated cluster.

    Args:
        profile: How long gradients take.
        workers: How many there are.
        seed: Of their times.
        policy: What the server does.
        limit: Units after which the run ends.

    Attributes:
        rounds: The rounds by commits so far, each commit counted as w/n.
    """

    profile: Profile
    workers: int
    seed: int
    policy: Policy
    limit: float
    rounds: float = field(default=0.0, init=False)
    _order: int = field(default=0, init=False)

    def events(self) -> list[Event]:
        """All events until the limit, in their order."""
        return list(self.iterate())

    def iterate(self) -> Iterator[Event]:
        """The same, one by one; without end if there is no limit."""
        self._timetable = Timetable(tries=False)  # steps have no fixed costs here, but over the slow link
        self._shares = Shares(self._timetable, self.policy.smallest)
        self._rendezvous = Rendezvous(self._timetable, self.policy.wait)
        self._times = [self.profile.times(self.seed, worker, self.workers) for worker in range(self.workers)]
        self._heap: list[tuple[float, int, int, int, int]] = []  # time, order, worker, life, samples; none: it joins
        self._lives, self._steps = [0] * self.workers, [0] * self.workers
        self._done, self._own, self.rounds = 0.0, [0.0] * self.workers, 0.0
        kills, killed, now = self.profile.kills(self.workers), 0, 0.0
        for worker in range(self.workers):
            yield self._release(worker, 0.0)
        while True:
            look = self._rendezvous.next_look(now)
            now = min(self._heap[0][0], math.inf if look is None else look)
            if self.profile.killed_every and kills(killed)[0] <= now:
                now, victim = kills(killed)
                killed += 1
                self._kill(victim, now)
            elif now > self.limit:
                return
            elif self._heap[0][0] <= now:
                _, _, worker, life, size = heapq.heappop(self._heap)
                if life == self._lives[worker]:
                    yield from self._arrived(worker, size, now)
            for lease in self._rendezvous.due(now):
                yield self._release(int(lease.split(".")[0]), now, held=True)

    def _lease(self, worker: int) -> str:
        return f"{worker}.{self._lives[worker]}"

    def _kill(self, victim: int, at: float) -> None:
        self._rendezvous.end(self._lease(victim))
        self._timetable.end(self._lease(victim))
        self._lives[victim] += 1
        self._push(at + self.profile.away, victim, 0)

    def _push(self, at: float, worker: int, size: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, worker, self._lives[worker], size))

    def _arrived(self, worker: int, size: int, now: float) -> Iterator[Event]:
        if not size:
            self._own[worker] = self._done
            yield self._release(worker, now)
            return
        lease, share = self._lease(worker), size / SIZES
        self._timetable.arrived(lease, now, share)
        yield Event(now, worker, size, self._steps[worker] - 1)
        self._done += share
        self.rounds += share / max(1.0, self._done - self._own[worker])
        self._own[worker] = self._done
        waits = not self.policy.until or self.rounds < self.policy.until
        if not (waits and self._rendezvous.hold(lease, now)):
            yield self._release(worker, now)

    def _release(self, worker: int, now: float, held: bool = False) -> Event:
        share = self._shares.next(self._lease(worker))
        size = max(2, round(SIZES * share))  # as the SDK does
        self._timetable.began(self._lease(worker), now, share)
        overhead = OVERHEAD if worker >= self.workers - self.profile.far else 0.0
        self._push(now + overhead + self._times[worker](self._steps[worker]) * size / SIZES, worker, size)
        self._steps[worker] += 1
        return Event(now, worker, 0, self._steps[worker] - 1, held)
