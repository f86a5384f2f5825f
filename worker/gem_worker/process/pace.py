"""When a worker computes, and for how long at least: turns on the machine's cores, and simulated compute time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from gem_worker.process.compute_gate import Turns


@dataclass(frozen=True)
class Pace:
    """Has the computation of a gradient take at least a stated time; what is left of it is slept.

    For experiments on machines with fewer cores than workers, which can't show otherwise what many machines would do: the
    workers then sleep side by side instead of queueing for a core. It makes nothing faster, and says nothing about real speed.

    Attributes:
        step_seconds: Least seconds of a step; 0 leaves it as it is.
        now: Monotonic seconds.
        sleep: Waits that many seconds. It is called before and after every step, with 0 where there is nothing to wait for, so
            that it can end a worker that is to stop.
        turns: Who computes now, among the workers of a process; None where there is only one.
    """

    step_seconds: float = 0.0
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    turns: Turns | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One gradient is computed inside."""
        began = self.now()
        with self.turns.taken() if self.turns else nullcontext():
            self.sleep(0.0)
            yield
        self.sleep(max(0.0, began + self.step_seconds - self.now()))


FULL_SPEED = Pace()
