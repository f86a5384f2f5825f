"""Curves of bounded length: a run of any length becomes a few hundred points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

BINS = 400  # a long curve has between half as many points and these


class Curves:
    """Columns of numbers over a position that rises, such as the version or the time, in at most `BINS` bins of equal width.

    The bins become twice as wide whenever the positions outgrow them. What is not finite counts as unknown.

    Args:
        means: The columns of which a bin shows the mean.
        highest: The columns of which a bin shows the highest value.
        width: The width of a bin at first, in the unit of the position.

    Attributes:
        width: The width of a bin now.
        first: The first position that was added; None before it.
        final: The highest position, at least 0.
    """

    def __init__(self, means: Sequence[str], highest: Sequence[str], width: float = 1.0) -> None:
        self.width = width
        self.first: float | None = None
        self.final = 0.0
        self._sums = {name: np.zeros(BINS) for name in ("position", *means)}
        self._known = {name: np.zeros(BINS) for name in ("position", *means)}
        self._highest = {name: np.full(BINS, -np.inf) for name in highest}

    def add(self, positions: Column, columns: Mapping[str, Column]) -> None:
        """Adds values at `positions`, float64, shape (n,), with as many of each of `columns`. A missing column is unknown.

        An earlier position than the first counts as the first.
        """
        if not len(positions):
            return
        self.first = float(positions.min()) if self.first is None else self.first
        self.final = max(self.final, float(positions.max()))
        self._widen()
        bins = self.bins(positions)
        for name, column in {"position": positions, **columns}.items():
            known = np.isfinite(column)
            if name in self._sums:
                self._sums[name] += np.bincount(bins[known], column[known], BINS)
                self._known[name] += np.bincount(bins[known], minlength=BINS)
            if name in self._highest:
                np.maximum.at(self._highest[name], bins[known], column[known])

    def positions(self) -> Column:
        """The mean position in each bin that has a value, float64, shape (points,), as all columns."""
        return self.mean("position")

    def mean(self, name: str) -> Column:
        """The mean of a column in each bin; NaN without a finite number."""
        filled = self.filled()
        return _ratio(self._sums[name][filled], self._known[name][filled])

    def highest(self, name: str) -> Column:
        """The highest value of a column in each bin; NaN without a finite number."""
        values = self._highest[name][self.filled()]
        return np.where(np.isfinite(values), values, np.nan)

    def filled(self) -> Indices:
        """The numbers of the bins that have a value."""
        return np.asarray(np.flatnonzero(self._known["position"]))

    def bins(self, positions: Column) -> Indices:
        """The number of each position's bin."""
        return np.asarray(((positions - (self.first or 0.0)) // self.width).clip(0, BINS - 1).astype(np.int64))

    def _widen(self) -> None:
        while self.final - (self.first or 0.0) >= BINS * self.width:
            self.width *= 2
            for sums in (*self._sums.values(), *self._known.values()):
                sums[:] = np.append(sums.reshape(-1, 2).sum(1), np.zeros(BINS // 2))
            for highest in self._highest.values():
                highest[:] = np.append(highest.reshape(-1, 2).max(1), np.full(BINS // 2, -np.inf))


def _ratio(sums: Column, counts: Column) -> Column:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums / counts)
