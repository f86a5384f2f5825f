"""The curves of a run, from its start to now: a bounded number of points, which become coarser as the run gets longer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gem_server.core.state_machine import Core
from gem_server.telemetry.progress import Evaluation, Progress

MAX_POINTS = 600
MIN_INTERVAL = 0.25  # seconds between two points, until there are MAX_POINTS
_RATE_SECONDS = 5.0  # that commits a second are counted over


@dataclass(frozen=True)
class Point:
    """The state of a run at one moment. None for what is unknown.

    Attributes:
        seconds: Time since the run's first commit, without times in which it had no server or no workers.
        version: Commits applied so far.
        commits_per_second: Applied commits a second, over the last few seconds.
        workers: Workers that hold a lease.
        loss, pi_median, staleness: Smoothed over about 50 commits.
        evaluation_loss, accuracy: Of an evaluation since the point before, on held-out data; accuracy from 0 to 1.
    """

    seconds: float
    version: int
    commits_per_second: float | None = None
    workers: int | None = None
    loss: float | None = None
    pi_median: float | None = None
    staleness: float | None = None
    evaluation_loss: float | None = None
    accuracy: float | None = None


class Curves:
    """Collects the points of a run. Call `sample` every `MIN_INTERVAL` seconds, on the thread that applies commits.

    It reads what `Progress` keeps anyway, so that commits do nothing for it. When there are `MAX_POINTS`, two neighbours
    become one, and the time between new points doubles.

    Args:
        core: The state machine.
        progress: The run's smoothed figures.
        clock: Returns monotonic seconds.
        earlier: The points from before this start of the server, if they are known.

    Attributes:
        points: The points so far, by time.
        begin_version: Version at which the curves begin; 0 if they cover the whole run.
        start_version: Version at which this server started; 0 for a new run.
        commits_per_second: Applied commits a second, over the last 5 seconds; None at first.
    """

    def __init__(self, core: Core, progress: Progress, clock: Callable[[], float], earlier: Sequence[Point] = ()) -> None:
        self._core, self._progress, self._clock = core, progress, clock
        self.points = list(earlier)
        self.start_version = core.central.version
        self.begin_version = max(0, earlier[0].version - 1) if earlier else self.start_version
        self.commits_per_second: float | None = None
        self._seconds = earlier[-1].seconds if earlier else 0.0
        self._interval = max(MIN_INTERVAL, 2 * self._seconds / MAX_POINTS)
        self._next = self._seconds  # when the next point is due, on the curve's time
        self._looked = clock()
        self._seen: deque[tuple[float, int]] = deque()
        self._shown: Evaluation | None = None

    def sample(self) -> None:
        """Adds a point if one is due. Time stands still before the first commit, and while there are no workers."""
        now, version = self._clock(), self._core.central.version
        passed, self._looked = now - self._looked, now
        self._measure_rate(now, version)
        if version == 0 or not (self._core.leases.live or version != self._last_version):
            return
        self._seconds += passed if self.points else 0.0
        if self._seconds < self._next:
            return
        if len(self.points) >= MAX_POINTS:
            self._thin_out()
        self.points.append(self._point())
        self._shown = self._progress.evaluation
        self._next = self._seconds + self._interval

    def until_now(self) -> list[Point]:
        """The points, and one for this moment."""
        point = self._point()
        return [*self.points, point] if self.points and point.seconds > self.points[-1].seconds else self.points[:]

    @property
    def _last_version(self) -> int:
        return self.points[-1].version if self.points else self.start_version

    def _point(self) -> Point:
        progress, evaluation = self._progress, self._progress.evaluation
        new = evaluation if evaluation is not self._shown else None
        return Point(
            seconds=self._seconds,
            version=self._core.central.version,
            commits_per_second=self.commits_per_second,
            workers=len(self._core.leases.live),
            loss=progress.loss.value,
            pi_median=progress.pi_median.value,
            staleness=progress.staleness.value,
            evaluation_loss=new.loss if new else None,
            accuracy=new.accuracy if new else None,
        )

    def _measure_rate(self, now: float, version: int) -> None:
        self._seen.append((now, version))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_SECONDS:
            self._seen.popleft()
        began, before = self._seen[0]
        self.commits_per_second = (version - before) / (now - began) if version and now - began >= 1 else None

    def _thin_out(self) -> None:
        """Keeps the first point, and of each pair after it the later one, with the pair's newest evaluation."""
        first, rest = self.points[0], self.points[1:]
        self.points = [first, *map(_merged, rest[0::2], rest[1::2]), *rest[len(rest) // 2 * 2 :]]
        self._interval *= 2


def _merged(earlier: Point, later: Point) -> Point:
    if later.evaluation_loss is not None:
        return later
    return replace(later, evaluation_loss=earlier.evaluation_loss, accuracy=earlier.accuracy)
