"""What the run looks like lately: smoothed figures, each worker's last commit, the last evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gem_server.apply_loop import Timing
from gem_server.core.facts import Applied

_DECAY = 0.98  # about the last 50 values


class Smoothed:
    """An exponential moving average without a bias towards its start (as in Adam); NaN and infinities are passed over.

    Attributes:
        value: The mean, None before the first value. Until there are about 50 it is close to the mean of all of them.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._weights = 0.0  # sum of those that the values have in the average: 1 − 0.98ⁿ

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._weights = _DECAY * self._weights + (1 - _DECAY)
            share = (1 - _DECAY) / self._weights
            self.value = share * value + (0.0 if self.value is None else (1 - share) * self.value)


@dataclass
class Traffic:
    """Bytes of tensor frames so far."""

    received: int = 0
    sent: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy (0 to 1, or None) of one version on held-out data."""

    version: int
    loss: float
    accuracy: float | None


@dataclass
class WorkerProgress:
    """A live worker's commits under its present lease, and the last of them.

    Attributes:
        commits: How many were applied.
        staleness: Sum of their τ.
        influence: Sum of their scales: how many commits at full strength they amount to.
        rejected: How many were refused.
        last: The last one that was applied, or discarded.
    """

    commits: int = 0
    staleness: int = 0
    influence: float = 0.0
    rejected: int = 0
    last: Applied | None = None


@dataclass
class Progress:
    """Fed with every applied commit, in order; read by the status and the metrics, which another thread serves.

    Attributes:
        holds_lease: Whether a worker of that name is in the run: nothing is kept of one that left while its commit was applied.
    """

    started: float
    holds_lease: Callable[[str], bool] = lambda worker: True
    loss: Smoothed = field(default_factory=Smoothed)
    pi_median: Smoothed = field(default_factory=Smoothed)
    staleness: Smoothed = field(default_factory=Smoothed)
    last: Applied | None = None
    evaluation: Evaluation | None = None
    workers: dict[str, WorkerProgress] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)  # by name of the error
    nonfinite_losses: int = 0
    checkpoint_version: int | None = None
    checkpoint_at: float = 0.0  # on the monotonic clock
    draining: bool = False

    def applied(self, applied: Applied, timing: Timing) -> None:
        self.last = applied
        self.staleness.add(applied.staleness)
        if applied.loss is not None:
            self.loss.add(applied.loss)
            self.nonfinite_losses += not math.isfinite(applied.loss)
        if applied.pi is not None:
            self.pi_median.add(applied.pi.median)
        if not self.holds_lease(applied.worker):
            return
        worker = self.workers.setdefault(applied.worker, WorkerProgress())
        worker.last = applied
        if not applied.discarded:
            worker.commits += 1
            worker.staleness += applied.staleness
            worker.influence += applied.scale

    def refused(self, worker: str | None, error: str) -> None:
        """A commit was refused with this error; its worker, if it holds a lease, is known."""
        self.rejected[error] += 1
        if worker is not None:
            self.workers.setdefault(worker, WorkerProgress()).rejected += 1

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation

    def checkpointed(self, version: int, now: float) -> None:
        self.checkpoint_version, self.checkpoint_at = version, now

    def forget(self, worker: str) -> None:
        """The worker has left."""
        self.workers.pop(worker, None)
