"""One run, in a process of its own. It starts the contender's processes, gives the start signal, kills workers as the profile
says, and ends at the limit.

The clock starts when all processes are ready. Its process has one thread, because it forks the others.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import vector_to_parameters

from benchmarks.lib import wire
from benchmarks.lib.launch import RunFailed
from benchmarks.lib.results import plain
from benchmarks.versus.backups import Backups
from benchmarks.versus.ddp import Ddp
from benchmarks.versus.family import DIVERGED, Family
from benchmarks.versus.ours import Ours
from benchmarks.versus.pace import Gate, snapshots
from benchmarks.versus.profiles import LINK_DELAY, LINK_RATE
from benchmarks.versus.setup import Setup

_MEMORY = Path("/dev/shm")  # nobody waits for a disk there
_KEPT_OUTPUT = Path("runs/versus-failed")  # what the processes of a failed run have printed
_READY_SECONDS = 240.0
_POLL_SECONDS = 0.02

Event = tuple[float, Callable[[], None]]
# (units from the start, held-out loss, samples, exchanges); the loss is None if it was NaN or infinite.
Point = tuple[float, float | None, int, int]


class RaceError(Exception):
    """The run has no result; the message says why."""


class Race:
    """A run from its start to its end."""

    def __init__(self, setup: Setup, family: Family) -> None:
        self._setup, self._family, self._began = setup, family, time.monotonic()
        setup.problem()
        if setup.kind.far:
            self._family.start("wire", wire.run, setup.folder, LINK_RATE, LINK_DELAY)
            self._wait_until(lambda: wire.is_up(setup.folder))
        chosen = Ours if setup.contender == "gem" else Backups if setup.first else Ddp
        self._started = chosen(setup, family)

    def run(self) -> dict[str, Any]:
        """The curve, and whether a gradient was not finite. Raises RaceError if a process fails."""
        start = self._begin()
        diverged = self._watch(start)
        self._family.end()
        return {"curve": list(self._curve(start)), "diverged": diverged}

    def _begin(self) -> float:
        """Waits until all processes are ready, and gives the start signal."""
        gate = Gate(self._setup.folder)
        while gate.ready() < self._started.members:
            self._gradients_are_finite()
            if time.monotonic() > self._began + _READY_SECONDS:
                raise RaceError(f"{gate.ready()} of {self._started.members} processes were ready after {_READY_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return gate.open()

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Raises RaceError if a process fails meanwhile."""
        while not holds():
            self._gradients_are_finite()
            time.sleep(_POLL_SECONDS)

    def _watch(self, start: float) -> bool:
        """Waits for the end; returns whether a gradient was not finite."""
        events = deque[Event](self._events())
        while (now := (time.monotonic() - start) / self._setup.unit) < self._setup.limit:
            if not self._gradients_are_finite():
                return True
            while events and now >= events[0][0]:
                events.popleft()[1]()
            time.sleep(_POLL_SECONDS)
        return False

    def _curve(self, start: float) -> Iterator[Point]:
        """The held-out loss of the first θ and of each snapshot until the limit."""
        problem = self._setup.problem()
        model = problem.model(self._setup.seed)
        yield 0.0, plain(problem.score(model)), 0, 0
        for found in snapshots(self._setup.folder):
            units = round((found.time - start) / self._setup.unit, 3)
            if units <= self._setup.limit:
                vector_to_parameters(torch.from_numpy(found.theta), model.parameters())
                yield units, plain(problem.score(model)), found.samples, found.exchanges

    def _events(self) -> Iterator[Event]:
        """When a worker is killed, and when it comes back."""
        kind = self._setup.kind
        if not kind.killed_every:
            return
        assert isinstance(self._started, Ours), "others can't do without a worker"
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


def raced(profile: str, **settings: Any) -> dict[str, Any]:
    """Makes one run, in a process of its own. Returns the curve, whose points are of the kind `Point`, and whether the run
    `diverged`; `settings` are those of `Setup`. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="versus-", dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        setup = Setup(profile=profile, folder=Path(name), **settings)
        ours, theirs = Pipe(duplex=False)
        process = get_context("spawn").Process(target=_run, args=(setup, theirs))
        process.start()
        theirs.close()
        try:
            found: dict[str, Any] = ours.recv()
        except EOFError:
            found = {"failed": "its process has ended"}
        finally:
            process.terminate()
            process.join()
        if "failed" in found:
            shutil.copytree(name, _KEPT_OUTPUT, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.npz"))
            raise RunFailed(f"{found['failed']} (what its processes printed is in {_KEPT_OUTPUT})")
        return found


def _run(setup: Setup, outcome: Connection) -> None:
    """The body of the race's process. If it is ended, the others end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    for name in [name for name in os.environ if name.startswith("GEM_")]:
        del os.environ[name]
    torch.set_num_threads(1)
    family = Family(setup.folder)
    try:
        found = Race(setup, family).run()
    except RaceError as error:
        found = {"failed": str(error)}
    finally:
        family.end()
    outcome.send(found)
