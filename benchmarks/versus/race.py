"""One run, in a process of its own: `python -m benchmarks.versus.race FOLDER`. It starts the contender's processes, gives the
start signal, kills workers as the profile says, and ends when the lower loss is reached or the limit is; with a schedule, at
the limit.

The clock starts when all processes are ready. Its process has one thread, because it forks the others.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

import torch
from gem_api.process.lifetime import interruptible
from torch.nn.utils import vector_to_parameters

from benchmarks.lib import wire
from benchmarks.versus.contenders import start
from benchmarks.versus.family import DIVERGED, Family
from benchmarks.versus.outcome import Outcome, Point, finite, outcome
from benchmarks.versus.pace import Gate, exchange_times, last_snapshot
from benchmarks.versus.profiles import LINK_DELAY, LINK_RATE
from benchmarks.versus.setup import OUTCOME, Setup

_READY_SECONDS = 240.0
_POLL_SECONDS = 0.02
_NOT_FINITE = 3  # scores in a row, after which a run has diverged

Event = tuple[float, Callable[[], None]]


class RaceError(Exception):
    """The run has no result; the message says why."""


class Race:
    """A run from its start to its end."""

    def __init__(self, setup: Setup, family: Family) -> None:
        self._setup, self._family, self._began = setup, family, time.monotonic()
        setup.problem()
        self._scores, theirs = Pipe(duplex=False)
        family.start("scorer", score, setup, theirs)
        if setup.kind.far:
            self._lay_wire()
        self._started = start(setup, family)
        self._curve: list[Point] = []
        self._start = 0.0

    def _lay_wire(self) -> None:
        self._family.start("wire", wire.run, self._setup.path, LINK_RATE, LINK_DELAY)
        self._wait_until(lambda: wire.is_up(self._setup.path))

    def run(self) -> Outcome | float:
        """The outcome, or the mean milliseconds of an exchange. Raises RaceError if a process fails."""
        self._curve.append((0.0, self._scores.recv(), 0, 0))
        self._start = self._begin()
        if self._setup.exchange_only:
            return self._exchange_time()
        diverged = self._watch()
        if self._setup.schedule and not diverged:
            self._finish()
        return outcome(self._curve, self._setup.losses, diverged, time.monotonic() - self._began)

    def _begin(self) -> float:
        """Waits until all processes are ready, and gives the start signal."""
        gate = Gate(self._setup.path)
        while gate.ready() < self._started.members:
            self._gradients_are_finite()
            if time.monotonic() > self._began + _READY_SECONDS:
                raise RaceError(f"{gate.ready()} of {self._started.members} processes were ready after {_READY_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return gate.open()

    def _exchange_time(self) -> float:
        self._wait_until(lambda: len(exchange_times(self._setup.path)) >= self._setup.workers)
        return fmean(exchange_times(self._setup.path))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Raises RaceError if a process fails meanwhile."""
        while not holds():
            self._gradients_are_finite()
            time.sleep(_POLL_SECONDS)

    def _watch(self) -> bool:
        """Waits for the end; returns whether the run has diverged."""
        events = deque[Event](self._events())
        while (now := (time.monotonic() - self._start) / self._setup.unit) < self._setup.limit:
            if self._scores.poll(_POLL_SECONDS):
                self._take_score()
            if not self._setup.schedule and (last := self._curve[-1][1]) is not None and last <= self._setup.losses[1]:
                return False
            if all(point[1] is None for point in self._curve[-_NOT_FINITE:]) or not self._gradients_are_finite():
                return True
            while events and now >= events[0][0]:
                events.popleft()[1]()
        return False

    def _take_score(self) -> None:
        moment, loss, samples, exchanges = self._scores.recv()
        self._curve.append((round((moment - self._start) / self._setup.unit, 3), finite(loss), samples, exchanges))

    def _finish(self) -> None:
        """Waits for the score of the last snapshot, and leaves out what came after the limit."""
        last = last_snapshot(self._setup.path)
        while last is not None and self._curve[-1][0] < (last.time - self._start) / self._setup.unit - 0.01:
            self._wait_until(partial(self._scores.poll, _POLL_SECONDS))
            self._take_score()
        self._curve = [point for point in self._curve if point[0] <= self._setup.limit]

    def _events(self) -> Iterator[Event]:
        """When a worker is killed, and when it comes back."""
        kind = self._setup.kind
        if not kind.killed_every:
            return
        for number in itertools.count():
            moment, worker = kind.kills(self._setup.workers)(number)
            if moment >= self._setup.limit:
                return
            yield moment, partial(self._family.kill, f"worker-{worker}")
            yield moment + kind.away, partial(self._started.revive, worker)

    def _gradients_are_finite(self) -> bool:
        """Raises RaceError if a process has failed otherwise than by a gradient."""
        failed = self._family.failed()
        if failed is not None and failed[1] != DIVERGED:
            raise RaceError(f"{failed[0]} ended with status {failed[1]}: {self._family.said(failed[0])}")
        return failed is None


def score(setup: Setup, scores: Connection) -> None:
    """Scores each new snapshot on held-out data: the loss of the first θ, then (time, loss, samples, exchanges) of each."""
    torch.set_num_threads(1)
    problem = setup.problem()
    model = problem.model(setup.seed)
    scores.send(problem.score(model))
    newest = 0.0
    while True:
        found = last_snapshot(setup.path)
        if found is None or found.time <= newest:
            time.sleep(_POLL_SECONDS)
            continue
        newest = found.time
        vector_to_parameters(torch.from_numpy(found.theta), model.parameters())
        scores.send((found.time, problem.score(model), found.samples, found.exchanges))


@interruptible()
def main() -> None:
    setup = Setup.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    family = Family(setup.path)
    try:
        found = Race(setup, family).run()
    except RaceError as error:
        sys.exit(str(error))
    finally:
        family.end()
    (setup.path / OUTCOME).write_text(json.dumps(found if isinstance(found, float) else asdict(found)))


if __name__ == "__main__":
    main()
