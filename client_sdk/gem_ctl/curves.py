"""Condenses a run's history of any length into curves of a few hundred points, and into totals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gem_api.curves import BINS, Column, Curves, trailing
from gem_api.history import Piece

Flags = npt.NDArray[np.bool_]

MAX_STALENESS = 10_000  # the distribution counts a higher staleness as this one
_MEANS = ("loss", "staleness", "pi_median", "pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy")
COLUMNS = (*_MEANS, "version", "unix_seconds", "discarded", "samples")


@dataclass
class PerWorker:
    """A value for each worker, in the order of the first commit.

    Attributes:
        commits: Applied commits.
        samples: Samples of the applied commits.
        discarded: Commits that the rule discarded.
        staleness: Sum of the staleness of the applied commits.
        last: Version of the last commit.
        last_staleness: Staleness of the last commit.
    """

    commits: Column
    samples: Column
    discarded: Column
    staleness: Column
    last: Column
    last_staleness: Column


class RunCurves(Curves):
    """The history of a run over its versions, and its totals.

    Attributes:
        applied, discarded, samples, nonfinite_losses, damaged: Totals.
        begin, end: Unix seconds of the first and last commit.
        distribution: Applied commits by staleness, shape (MAX_STALENESS + 1,).
        names: The workers, in the order of their first commit.
        per_worker: Their totals, in the same order.
    """

    def __init__(self) -> None:
        super().__init__((*_MEANS, "applied", "at_work"), ("staleness", "unix_seconds"))
        self.applied = self.discarded = self.nonfinite_losses = self.damaged = 0
        self.samples = 0.0
        self.begin, self.end = np.inf, -np.inf
        self.distribution = np.zeros(MAX_STALENESS + 1)
        self.per_worker = PerWorker(*(np.zeros(0) for _ in range(6)))
        self._numbers: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def add_piece(self, piece: Piece) -> None:
        """Adds the next lines of the history."""
        self.damaged += piece.damaged
        if not piece.workers:
            return
        lines = len(piece.workers)
        columns = {name: piece.columns.get(name, np.full(lines, np.nan)) for name in COLUMNS}
        version, applied = columns["version"], np.logical_not(columns["discarded"] > 0)
        self.add(version, {**columns, "applied": applied.astype(np.float64)})
        self._add_totals(columns, applied, piece.nonfinite_losses)
        self._add_workers(piece.workers, columns, applied)

    def end_of_history(self) -> None:
        """Call it after the last line: a worker whose last commit is recent was at work to the end."""
        workers = self.per_worker
        recent = workers.last + 2 * (workers.last_staleness + 1) >= self.final
        self._add_work(workers.last[recent] + 1, np.full(int(recent.sum()), self.final))

    def staleness_below(self, share: float) -> float | None:
        """The staleness that this share of the applied commits did not exceed; None without commits."""
        counts = np.cumsum(self.distribution)
        return float(np.searchsorted(counts, share * counts[-1])) if counts[-1] else None

    def highest_staleness(self, commits: int) -> Column:
        """The highest staleness in each bin and the bins before it, which hold about `commits` commits together."""
        values = np.nan_to_num(self.highest("staleness"), nan=-np.inf)
        highest = trailing(values, self.window(commits), -np.inf).max(1, initial=-np.inf)
        return np.where(np.isfinite(highest), highest, np.nan)

    def workers(self) -> Column:
        """The mean number of workers at work in each bin.

        A commit of version v with staleness τ was computed during versions v − τ to v.
        """
        filled = self.filled()
        starts = (self.first or 0.0) + self.width * np.arange(BINS)
        versions = np.minimum(self.width, self.final - starts + 1)
        return np.asarray(self._sums["at_work"][filled] / np.maximum(1.0, versions[filled]))

    def rates(self, commits: int) -> Column:
        """Commits applied per second up to the end of each bin, over about `commits` commits; NaN if the clock stood still."""
        counts, times = np.cumsum(self._sums["applied"][self.filled()]), self.highest("unix_seconds")
        before = np.maximum(0, np.arange(len(times)) - self.window(commits))
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = (counts - counts[before]) / (times - times[before])
        return np.where(np.isfinite(rates) & (rates >= 0) & (times > times[before]), rates, np.nan)

    def _add_totals(self, columns: dict[str, Column], applied: Flags, nonfinite_losses: int) -> None:
        self.applied += int(applied.sum())
        self.discarded += int((~applied).sum())
        self.nonfinite_losses += nonfinite_losses
        self.samples += float(np.nansum(columns["samples"][applied]))
        times = columns["unix_seconds"][np.isfinite(columns["unix_seconds"])]
        self.begin, self.end = min(self.begin, times.min(initial=np.inf)), max(self.end, times.max(initial=-np.inf))
        staleness = columns["staleness"][applied & np.isfinite(columns["staleness"])].clip(0, MAX_STALENESS)
        self.distribution += np.bincount(staleness.astype(np.int64), minlength=MAX_STALENESS + 1)

    def _add_workers(self, names: list[str], columns: dict[str, Column], applied: Flags) -> None:
        version, staleness = columns["version"], np.nan_to_num(columns["staleness"]).clip(0, None)
        for name in names:
            self._numbers.setdefault(name, len(self._numbers))
        worker = np.array([self._numbers[name] for name in names])
        count, totals = len(self._numbers), self.per_worker
        for name, column in vars(totals).items():
            fill = (self.first or 0.0) - 1 if name == "last" else 0.0
            setattr(totals, name, np.append(column, np.full(count - len(column), fill)))
        totals.commits += np.bincount(worker[applied], minlength=count)
        totals.samples += np.bincount(worker[applied], np.nan_to_num(columns["samples"][applied]), count)
        totals.discarded += np.bincount(worker[~applied], minlength=count)
        totals.staleness += np.bincount(worker[applied], staleness[applied], count)
        order = np.argsort(worker, kind="stable")
        worker, version, staleness = worker[order], version[order], staleness[order]
        same = np.append(False, worker[1:] == worker[:-1])
        before = np.where(same, np.append(0.0, version[:-1]), totals.last[worker])
        self._add_work(np.maximum(version - staleness, before + 1), version)
        final = np.append(~same[1:], True)
        totals.last[worker[final]] = version[final]
        totals.last_staleness[worker[final]] = staleness[final]

    def _add_work(self, begin: Column, end: Column) -> None:
        """Adds to each bin the versions that the intervals [begin, end] have in it. An empty interval adds nothing."""
        begin = np.maximum(begin, self.first or 0.0)
        begin, end = begin[end >= begin], end[end >= begin]
        low, high = self.bins(begin), self.bins(end)
        start = self.first or 0.0
        # The bins from `low` on count whole; what lies before `begin` and after `end` is taken off again.
        steps = np.bincount(low, minlength=BINS + 1) - np.bincount(high + 1, minlength=BINS + 1)
        worked = self._sums["at_work"]
        worked += self.width * np.cumsum(steps)[:BINS]
        worked -= np.bincount(low, begin - start - low * self.width, BINS)
        worked -= np.bincount(high, start + (high + 1) * self.width - 1 - end, BINS)
