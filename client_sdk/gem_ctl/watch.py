"""What only successive statuses of a run show: rates, and the recent history of values."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gem_api.errors import GemError
from gem_api.v1 import training_pb2 as pb

from gem_ctl.ranges import RangeState
from gem_ctl.text import known

_WINDOW = 5.0  # seconds that a rate is taken over, so that a slow run's does not jump between 0 and 1
_REMEMBERED = 200  # points of a history


class Rate:
    """How fast a counter grows, per second. None at first, and again after the counter has gone backwards."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, count: int, now: float) -> None:
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()

    @property
    def value(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (began, before), (now, count) = self._seen[0], self._seen[-1]
        return (count - before) / (now - began) if now > began else None


class Watch:
    """A run, watched from a time `now` on.

    Attributes:
        status: The last status received, None before the first.
        ranges: The servers of the other ranges, when the last status was received.
        error: Why the last request failed; None if it succeeded.
        answered: When the last status was received; at first, when the watch began.
        commits, samples, workers: Rates; the workers' commits by name.
        histories: Recent values by the names that the picture shows, one per status; None if a status lacks the value.
        lease: The longest remaining time seen of any lease: about the length of a lease, which no status contains.
    """

    def __init__(self, now: float) -> None:
        self.status: pb.GetStatusResponse | None = None
        self.ranges: Sequence[RangeState] = ()
        self.error: GemError | None = None
        self.answered = now
        self.workers: dict[str, Rate]
        self.lease: float
        self._start_histories()
        self._start_rates()

    def saw(self, status: pb.GetStatusResponse, now: float, ranges: Sequence[RangeState] = ()) -> None:
        """Records a status received, and the states of the other ranges' servers."""
        before = self.status or status
        if status.run_id != before.run_id:
            self._start_histories()
            self._start_rates()
        elif status.version < before.version or status.uptime_seconds < before.uptime_seconds:
            self._start_rates()  # another process serves the run, from a checkpoint: its counters start elsewhere
        self.status, self.ranges, self.error, self.answered = status, ranges, None, now
        self.commits.saw(status.version, now)
        self.samples.saw(status.shards.samples_committed, now)
        self.workers = {worker.name: self.workers.get(worker.name, Rate()) for worker in status.workers}
        for worker in status.workers:
            self.workers[worker.name].saw(worker.commits, now)
            self.lease = max(self.lease, worker.lease_remaining_seconds)
        self.histories["commits/s"].append(self.commits.value)
        self.histories["staleness"].append(status.staleness)
        self.histories["loss"].append(known(status, "training_loss"))
        self.histories["median π"].append(known(status, "pi_median"))

    def missed(self, error: GemError) -> None:
        """Records a failed request."""
        self.error = error

    def _start_histories(self) -> None:
        names = ("commits/s", "staleness", "loss", "median π")
        self.histories = {name: deque[float | None](maxlen=_REMEMBERED) for name in names}

    def _start_rates(self) -> None:
        self.commits, self.samples = Rate(), Rate()
        self.workers, self.lease = {}, 0.0
