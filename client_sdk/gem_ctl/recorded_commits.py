"""The commits of a run's history: curves of a few hundred points, and totals. They fit into memory however long the run was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gem_api.curves import Column
from gem_api.history import HistoryError, Piece, read_history
from gem_api.timeline import Timeline

MAX_STALENESS = 10_000  # the distribution counts a higher staleness as this one
_FACTS = ("pi_zero_ratio", "pi_max_ratio", "proxy_energy", "central_energy")
COLUMNS = ("loss", "staleness", "pi_median", *_FACTS, "version", "unix_seconds", "discarded", "samples")


@dataclass
class PerWorker:
    """A value for each worker, in the order of the first commit.

    Attributes:
        commits: Applied commits.
        samples: Samples of the applied commits.
        discarded: Commits that the rule discarded.
        staleness: Sum of the staleness of the applied commits.
        last: Version of the last commit.
    """

    commits: Column
    samples: Column
    discarded: Column
    staleness: Column
    last: Column


class RecordedCommits:
    """The commits of a history, condensed.

    Attributes:
        timeline: The curves over the training time.
        first, final: The first and the highest version; None and 0 without commits.
        applied, discarded, samples, nonfinite_losses, damaged: Totals.
        begin, end: Unix seconds of the first and last commit.
        distribution: Applied commits by staleness, shape (MAX_STALENESS + 1,).
        names: The workers, in the order of their first commit.
        per_worker: Their totals, in the same order.
    """

    def __init__(self) -> None:
        self.timeline = Timeline(_FACTS)
        self.first: float | None = None
        self.final = 0.0
        self.applied = self.discarded = self.nonfinite_losses = self.damaged = 0
        self.samples = 0.0
        self.begin, self.end = np.inf, -np.inf
        self.distribution = np.zeros(MAX_STALENESS + 1)
        self.per_worker = PerWorker(*(np.zeros(0) for _ in range(5)))
        self._numbers: dict[str, int] = {}
        self._sums = dict.fromkeys(("staleness", "pi_median"), (0.0, 0))  # and of how many commits

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def add(self, piece: Piece) -> None:
        """Adds the next lines of the history."""
        self.damaged += piece.damaged
        if not piece.workers:
            return
        lines = len(piece.workers)
        columns = {name: piece.columns.get(name, np.full(lines, np.nan)) for name in COLUMNS}
        applied = np.logical_not(columns["discarded"] > 0)
        self.timeline.replay(columns, piece.workers)
        self.first = float(columns["version"].min()) if self.first is None else self.first
        self.final = max(self.final, float(columns["version"].max()))
        self.applied += int(applied.sum())
        self.discarded += int((~applied).sum())
        self.nonfinite_losses += piece.nonfinite_losses
        self.samples += float(np.nansum(columns["samples"][applied]))
        times = columns["unix_seconds"][np.isfinite(columns["unix_seconds"])]
        self.begin, self.end = min(self.begin, times.min(initial=np.inf)), max(self.end, times.max(initial=-np.inf))
        staleness = columns["staleness"][applied & np.isfinite(columns["staleness"])].clip(0, MAX_STALENESS)
        self.distribution += np.bincount(staleness.astype(np.int64), minlength=MAX_STALENESS + 1)
        for name, (total, count) in self._sums.items():
            known = columns[name][np.isfinite(columns[name])]
            self._sums[name] = total + float(known.sum()), count + len(known)
        self._add_workers(piece.workers, columns, applied)

    def mean(self, name: str) -> float | None:
        """The mean of "staleness" or "pi_median" over all commits; None without a finite number."""
        total, count = self._sums[name]
        return total / count if count else None

    def staleness_below(self, share: float) -> float | None:
        """The staleness that this share of the applied commits did not exceed; None without commits."""
        counts = np.cumsum(self.distribution)
        return float(np.searchsorted(counts, share * counts[-1])) if counts[-1] else None

    def _add_workers(self, names: list[str], columns: dict[str, Column], applied: np.ndarray) -> None:
        for name in names:
            self._numbers.setdefault(name, len(self._numbers))
        worker = np.array([self._numbers[name] for name in names])
        count, totals = len(self._numbers), self.per_worker
        for name, column in vars(totals).items():
            setattr(totals, name, np.append(column, np.zeros(count - len(column))))
        staleness = np.nan_to_num(columns["staleness"]).clip(0, None)
        totals.commits += np.bincount(worker[applied], minlength=count)
        totals.samples += np.bincount(worker[applied], np.nan_to_num(columns["samples"][applied]), count)
        totals.discarded += np.bincount(worker[~applied], minlength=count)
        totals.staleness += np.bincount(worker[applied], staleness[applied], count)
        np.maximum.at(totals.last, worker, columns["version"])


def read_commits(history: Path) -> RecordedCommits:
    """Reads a history file. Raises HistoryError if it is damaged throughout, OSError if it can't be read."""
    commits = RecordedCommits()
    for piece in read_history(history, COLUMNS):
        commits.add(piece)
    if commits.damaged and commits.first is None:
        raise HistoryError(f"{history} is damaged: none of its {commits.damaged} lines is a line of a history")
    return commits
