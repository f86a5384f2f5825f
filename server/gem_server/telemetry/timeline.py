"""The curves of a run over its training time: sampled while it runs, and replayed from its history after a restart."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from gem_api.curves import Column, Curves
from gem_api.v1 import training_pb2 as pb

from gem_server.telemetry.progress import Smoothed

SAMPLE_SECONDS = 0.25  # between two samples
_RATE_SECONDS = 5.0  # that commits a second are counted over
_LONGEST_PAUSE = 60.0  # seconds; a longer time between two commits of a history counts as this: the server was probably down
_MEANS = ("commits_per_second", "loss", "pi_median", "staleness", "evaluation_loss", "accuracy")
_HIGHEST = ("version", "workers")


class Rate:
    """How fast a counter grows per second, over the last 5 seconds: None in the first second after it has left 0."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, count: float, now: float) -> None:
        if not count:
            return
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_SECONDS:
            self._seen.popleft()

    @property
    def value(self) -> float | None:
        if not self._seen:
            return None
        (began, before), (now, count) = self._seen[0], self._seen[-1]
        return (count - before) / (now - began) if now - began >= 1 else None


class Timeline:
    """The curves of a run over its training time: seconds since its first commit, without times in which it had no server or no
    workers.

    Attributes:
        seconds: The training time so far.
        begin_version: The first version on the curves; None before it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.begin_version: int | None = None
        self._curves = Curves(_MEANS, _HIGHEST, SAMPLE_SECONDS)
        self._last: dict[str, float | None] = {}  # the newest sample, without what happens only once
        self._time = math.nan  # of the last commit of a history, Unix seconds
        self._rate, self._loss, self._pi_median, self._staleness = Rate(), Smoothed(), Smoothed(), Smoothed()
        self._version = 0.0  # of that commit
        self._next = 0.0  # when the next commit of a history counts as a sample

    def add(self, last: dict[str, float | None], once: Mapping[str, float | None] | None = None) -> None:
        """Adds a sample: the columns at this time, `version` among them, and what happened `once` since the last sample."""
        self._last = last
        self._add([self.seconds], [{**last, **(once or {})}])

    def _add(self, seconds: list[float], samples: list[dict[str, float | None]]) -> None:
        if self.begin_version is None and samples:
            self.begin_version = int(samples[0]["version"] or 0)
        columns = {name: np.array([sample.get(name) for sample in samples], np.float64) for name in (*_MEANS, *_HIGHEST)}
        self._curves.add(np.array(seconds), columns)  # None becomes NaN

    def replay(self, columns: Mapping[str, Column]) -> None:
        """Adds the next commits of a history, as if they had been sampled when they were made."""
        shown = [columns[name].tolist() for name in ("unix_seconds", "version", "loss", "pi_median", "staleness")]
        seconds, samples = [], []
        for time, version, loss, pi_median, staleness in zip(*shown, strict=True):
            passed, self._time = time - self._time, time
            self.seconds += min(max(passed, 0.0), _LONGEST_PAUSE) if math.isfinite(passed) else 0.0
            self._rate.add(version, self.seconds)
            self._loss.add(loss)
            self._pi_median.add(pi_median)
            self._staleness.add(staleness)
            self._version = version
            if self.seconds >= self._next:
                self._next = self.seconds + SAMPLE_SECONDS
                seconds.append(self.seconds)
                samples.append(self._replayed())
        self._add(seconds, samples)
        self._last = self._replayed()

    def _replayed(self) -> dict[str, float | None]:
        return {
            "version": self._version,
            "commits_per_second": self._rate.value,
            "loss": self._loss.value,
            "pi_median": self._pi_median.value,
            "staleness": self._staleness.value,
        }

    def message(self) -> pb.RunCurves:
        """The curves; the last point is the newest sample. Empty before the first."""
        curves = pb.RunCurves()
        if self.begin_version is None:
            return curves
        curves.seconds.extend([*self._curves.positions().tolist(), self.seconds])
        for name in (*_MEANS, *_HIGHEST):
            column = self._curves.highest(name) if name in _HIGHEST else self._curves.mean(name)
            last = self._last.get(name)
            values = [*column.tolist(), math.nan if last is None else last]
            getattr(curves, name).extend(map(int, values) if name == "version" else values)
        return curves
