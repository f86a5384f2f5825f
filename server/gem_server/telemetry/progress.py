"""The run's recent progress: smoothed figures, each worker's last commit, the last evaluation."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from gem_api.timeline import Smoothed

from gem_server.commit_times import CommitTimes
from gem_server.core.values import Applied

TRANSPORTS = ("memory", "tcp", "tls", "grpc")  # how a commit may come: on a lane, or over gRPC


@dataclass
class Meter:
    """Bytes of tensor data received and sent, counted by one thread at a time."""

    received: int = 0
    sent: int = 0


class Traffic:
    """The meters of a server: one for gRPC, and one for each lane, because several threads serve lanes.

    Attributes:
        grpc: Counts what gRPC carries, and the lanes that have ended.
    """

    def __init__(self) -> None:
        self.grpc = Meter()
        self._meters: dict[int, Meter] = {}

    def begin(self) -> Meter:
        """A meter for a lane, until `end`."""
        meter = Meter()
        self._meters[id(meter)] = meter
        return meter

    def end(self, meter: Meter) -> None:
        """The lane has ended: its bytes stay counted."""
        if self._meters.pop(id(meter), None) is not None:
            self.grpc.received += meter.received
            self.grpc.sent += meter.sent

    @property
    def received(self) -> int:
        """Bytes since the server started."""
        return self.grpc.received + sum(meter.received for meter in tuple(self._meters.values()))

    @property
    def sent(self) -> int:
        """Bytes since the server started."""
        return self.grpc.sent + sum(meter.sent for meter in tuple(self._meters.values()))


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy (0 to 1, or None) of one version on held-out data."""

    version: int
    loss: float
    accuracy: float | None


@dataclass
class WorkerProgress:
    """A live worker's commits since its current lease began.

    Attributes:
        commits: Number of applied commits.
        staleness: Sum of their staleness τ.
        influence: Sum of their mean scaling factors.
        pi_median: The smoothed median of π of its commits.
        rejected: Number of rejected commits.
        last: The last commit that was applied, or discarded by the rule.
        wait: The smoothed seconds that its replies were held for other workers' commits.
        waited: The seconds that they were held, all together.
        transport: How its last commit came, one of TRANSPORTS; empty before the first.
    """

    commits: int = 0
    staleness: int = 0
    influence: float = 0.0
    pi_median: Smoothed = field(default_factory=Smoothed)
    rejected: int = 0
    last: Applied | None = None
    wait: Smoothed = field(default_factory=Smoothed)
    waited: float = 0.0
    transport: str = ""


@dataclass
class Progress:
    """The run's progress. It is told of every applied commit, in order; the status and the metrics read it, the latter from
    another thread.

    Attributes:
        holds_lease: Whether a worker of that name is in the run. A worker that left while its commit was applied gets no entry.
        keep: Called with each evaluation.
    """

    started: float
    holds_lease: Callable[[str], bool] = lambda worker: True
    keep: Callable[[Evaluation], object] = bool
    loss: Smoothed = field(default_factory=Smoothed)
    pi_median: Smoothed = field(default_factory=Smoothed)
    staleness: Smoothed = field(default_factory=Smoothed)
    last: Applied | None = None
    evaluation: Evaluation | None = None
    evaluated_at: float = 0.0  # on the monotonic clock
    workers: defaultdict[str, WorkerProgress] = field(default_factory=lambda: defaultdict(WorkerProgress))
    rejected: Counter[str] = field(default_factory=Counter)  # by name of the error
    received: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRANSPORTS, 0))  # commits, by transport
    nonfinite_losses: int = 0
    checkpoint_version: int | None = None
    checkpoint_at: float = 0.0  # on the monotonic clock
    checkpoint_failures: int = 0
    draining: bool = False

    def applied(self, applied: Applied, times: CommitTimes) -> None:
        self.last = applied
        self.staleness.add(applied.staleness)
        if applied.loss is not None:
            self.loss.add(applied.loss)
            self.nonfinite_losses += not math.isfinite(applied.loss)
        if applied.pi is not None:
            self.pi_median.add(applied.pi.median)
        if not self.holds_lease(applied.worker):
            return
        worker = self.workers[applied.worker]
        worker.last = applied
        if applied.pi is not None:
            worker.pi_median.add(applied.pi.median)
        if not applied.discarded:
            worker.commits += 1
            worker.staleness += applied.staleness
            worker.influence += applied.scale

    def waited(self, worker: str, seconds: float) -> None:
        """Notes how long the reply to a commit was held."""
        if worker in self.workers:
            self.workers[worker].wait.add(seconds)
            self.workers[worker].waited += seconds

    def record_transport(self, worker: str, transport: str) -> None:
        """Counts a commit whose gradient is complete, and notes how it came from a live worker."""
        self.received[transport] += 1
        self.workers[worker].transport = transport

    def count_rejected(self, worker: str | None, error: str) -> None:
        """Counts a rejected commit, by the error's name. `worker` is None if the commit belongs to no live lease."""
        self.rejected[error] += 1
        if worker is not None:
            self.workers[worker].rejected += 1

    def evaluated(self, evaluation: Evaluation, now: float) -> None:
        self.evaluated_at, self.evaluation = now, evaluation
        self.keep(evaluation)

    def checkpointed(self, version: int, now: float) -> None:
        self.checkpoint_version, self.checkpoint_at = version, now

    def forget(self, worker: str) -> None:
        """Drops the entry of a worker that left."""
        self.workers.pop(worker, None)
