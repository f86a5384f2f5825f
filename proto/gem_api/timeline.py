"""The curves of a run over its training time: sampled while it runs, and replayed from its history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from gem_api.curves import Column, Curves

SAMPLE_SECONDS = 0.25  # between two samples
_DECAY = 0.98  # about the last 50 values
_RATE_SECONDS = 5.0  # that commits a second are counted over
_LONGEST_PAUSE = 60.0  # seconds; a longer time between two commits of a history counts as this: the server was probably down
_STILL = 9  # samples of such a pause: of a bin with a commit too, the curve shows what that says
_ROUNDS = 5  # that a worker's next commit may take and the worker is still at work
_MOST_AWAITED = 1e4  # staleness that this counts with, so that few commits are remembered
_SMOOTHED = ("loss", "pi_median", "staleness")
_MEANS = ("commits_per_second", *_SMOOTHED, "evaluation_loss", "accuracy")
_HIGHEST = ("version", "workers")


class Smoothed:
    """An exponential moving average, bias-corrected as in Adam. It ignores NaN and infinities.

    Attributes:
        value: The average; None before the first value. It is close to the plain mean of the first 50 or so values.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._weights = 0.0  # sum of the values' weights: 1 − 0.98ⁿ after n values

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._weights = _DECAY * self._weights + (1 - _DECAY)
            share = (1 - _DECAY) / self._weights
            self.value = share * value + (0.0 if self.value is None else (1 - share) * self.value)


class Rate:
    """The growth of a counter per second, over the last 5 seconds: None in the first second after it has left 0."""

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

    Args:
        facts: Columns of a history that are shown too, smoothed.

    Attributes:
        seconds: The training time so far.
        begin_version: The first version on the curves; None before it.
    """

    def __init__(self, facts: Sequence[str] = ()) -> None:
        self.seconds = 0.0
        self.begin_version: int | None = None
        self._means = (*_MEANS, *facts)
        self._curves = Curves(self._means, _HIGHEST, SAMPLE_SECONDS)
        self._last: dict[str, float | None] = {}  # the newest sample, without what happens only once
        # Of a history:
        self._time = math.nan  # of the last commit, Unix seconds
        self._version = 0.0  # of that commit
        self._next = 0.0  # when the next commit counts as a sample
        self._rate = Rate()
        self._smoothed = {name: Smoothed() for name in (*_SMOOTHED, *facts)}
        self._due: dict[str, float] = {}  # by worker at work: the version by which its next commit is due
        self._dues: list[tuple[float, str]] = []  # the same as a heap, with those that have been overtaken

    def add(self, last: dict[str, float | None], once: Mapping[str, float | None] | None = None) -> None:
        """Adds a sample: the columns at this time, `version` among them, and what happened `once` since the last sample."""
        self._last = last
        self._add([self.seconds], [{**last, **(once or {})}])

    def _add(self, seconds: list[float], samples: list[dict[str, float | None]]) -> None:
        if self.begin_version is None and samples:
            self.begin_version = int(samples[0]["version"] or 0)
        columns = {name: np.array([sample.get(name) for sample in samples], np.float64) for name in (*self._means, *_HIGHEST)}
        self._curves.add(np.array(seconds), columns)  # None becomes NaN

    def replay(self, columns: Mapping[str, Column], workers: Sequence[str] = ()) -> None:
        """Adds the next commits of a history, as if they had been sampled when they were made.

        Args:
            columns: The history's; what a missing one would say is unknown.
            workers: The worker of each commit. Without them, the number of workers is unknown.
        """
        unknown = np.full(len(columns["version"]), np.nan)
        times = np.append(self._time, columns.get("unix_seconds", unknown))
        self._time = float(times[-1])
        with np.errstate(invalid="ignore"):  # a damaged history may have infinite times
            passed = np.diff(times)
        seconds = (self.seconds + np.cumsum(np.where(np.isfinite(passed), passed.clip(0, _LONGEST_PAUSE), 0.0))).tolist()
        shown = [columns.get(name, unknown).tolist() for name in self._smoothed]
        versions = columns["version"].tolist()
        dues = _dues(columns["version"], columns.get("staleness", unknown)) if workers else []
        moments, begin = list[float](), 0
        samples = list[dict[str, float | None]]()

        def take(end: int) -> None:
            for average, column in zip(self._smoothed.values(), shown, strict=True):
                for value in column[begin:end]:
                    average.add(value)
            for version, second in zip(versions[begin:end], seconds[begin:end], strict=True):
                self._rate.add(version, second)
            for due, worker in zip(dues[begin:end], workers[begin:end], strict=True):
                self._due[worker] = due
                heappush(self._dues, (due, worker))
            if end > begin:
                self._version, self.seconds = versions[end - 1], seconds[end - 1]

        pauses = (passed > _LONGEST_PAUSE).tolist()
        for at, (moment, paused) in enumerate(zip(seconds, pauses, strict=True), 1):
            if moment < self._next and at < len(seconds) and not paused:
                continue
            if paused:  # before this commit: nobody was at work
                take(at - 1)
                begin = at - 1
                moments += np.linspace(self.seconds, moment, _STILL + 2)[1:-1].tolist()
                still: dict[str, float | None] = {"version": self._version, "commits_per_second": 0.0, "workers": 0.0}
                samples += _STILL * [still]
                self._rate, self._due, self._dues = Rate(), {}, []
            take(at)
            begin = at
            if moment >= self._next:
                self._next = moment + SAMPLE_SECONDS
                moments.append(moment)
                samples.append(self._replayed())
        self._add(moments, samples)
        self._last = self._replayed()

    def _replayed(self) -> dict[str, float | None]:
        smoothed = {name: average.value for name, average in self._smoothed.items()}
        return {
            "version": self._version, "commits_per_second": self._rate.value, "workers": self._at_work() or None, **smoothed,
        }  # fmt: skip

    def _at_work(self) -> int:
        """The number of workers whose last commit is not long ago."""
        while self._dues and self._dues[0][0] < self._version:
            due, worker = heappop(self._dues)
            if self._due.get(worker) == due:
                del self._due[worker]
        return len(self._due)

    def evaluated(self, version: float, loss: float, accuracy: float | None) -> None:
        """Adds an evaluation of a version of the history; call it after the last `replay`, in the order of the versions."""
        if self.begin_version is None:
            return
        found = {"evaluation_loss": loss, "accuracy": accuracy}
        if version >= self._version:
            self._last |= found
        else:
            at = np.interp([version], self._versions(), self._curves.positions())
            self._curves.add(at, {name: np.array([value], np.float64) for name, value in found.items()})

    def _versions(self) -> Column:
        """The version at each position; where there is an evaluation alone, between those beside it."""
        versions, positions = self._curves.highest("version"), self._curves.positions()
        sampled = np.isfinite(versions)
        return np.interp(positions, positions[sampled], versions[sampled])

    def columns(self) -> dict[str, list[float]]:
        """The curves by name, `seconds` among them, with NaN for what is unknown; the last point is the newest sample. Empty
        before the first."""
        if self.begin_version is None:
            return {}
        found = {"seconds": [*self._curves.positions().tolist(), self.seconds]}
        columns = {name: self._curves.mean(name) for name in self._means}
        columns |= {"version": self._versions(), "workers": self._curves.highest("workers")}
        for name, column in columns.items():
            last = self._last.get(name)
            found[name] = [*column.tolist(), math.nan if last is None else last]
        return found


def _dues(version: Column, staleness: Column) -> list[float]:
    """By commit: the version up to which its worker counts as at work. A slow worker's commits are stale, and far apart."""
    known = np.nan_to_num(staleness).clip(0, _MOST_AWAITED)
    dues: list[float] = (version + _ROUNDS * (np.maximum(known, known.mean()) + 1)).tolist()
    return dues
