"""Limits of a worker's steps: when it may compute a gradient, and the minimum time that takes (simulated compute time)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from gem_worker.compute_gate import ComputeGate


@dataclass(frozen=True)
class StepLimits:
    """Limits on the computation of one gradient: a free slot on the machine's cores, and a minimum time.

    The minimum time simulates slow workers on a machine with fewer cores than workers: they sleep at the same time instead of
    queueing for a core. It says nothing about real speed.

    Attributes:
        step_seconds: Minimum seconds of a step with a whole batch; the rest is slept. 0 for no minimum.
        now: Returns monotonic seconds.
        sleep: Waits for the given number of seconds. Called before and after every step, with 0 if there is nothing to wait
            for, so that it can raise and so stop the worker.
        gate: Limits how many workers of the process compute at the same time; None for no limit.
    """

    step_seconds: float = 0.0
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    gate: ComputeGate | None = None

    @contextmanager
    def step(self, share: float = 1.0) -> Iterator[None]:
        """The block computes one gradient, on a batch that has this share of a whole one."""
        began = self.now()
        with self.gate.slot() if self.gate else nullcontext():
            self.sleep(0.0)
            yield
        self.sleep(max(0.0, began + share * self.step_seconds - self.now()))


NO_LIMITS = StepLimits()
