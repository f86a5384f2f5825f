"""A second implementation of YellowFin's momentum (1706.03471): from full histories of gradients, by a search for the
minimum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rules.oracle_rules import Matched, Values, Worker

BETA, WINDOW, MAX_MOMENTUM = 0.999, 20, 0.999
_GOLDEN = (math.sqrt(5) - 1) / 2


def weighted(values: Any) -> Any:
    """The mean of the values, each weighted by β^age."""
    return np.average(values, axis=0, weights=BETA ** np.arange(len(values))[::-1])


def momentum_against_noise(distance: float, least: float, variance: float) -> float:
    """The μ in [0, 1] that minimises μ·D² + (1 − √μ)⁴/h_min²·C, by golden-section search over √μ, where it is convex."""

    def expected(root: float) -> float:
        return root**2 * distance**2 + (1 - root) ** 4 / least**2 * variance

    low, high = 0.0, 1.0
    for _ in range(80):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if expected(left) < expected(right) else (left, high)
    return ((low + high) / 2) ** 2


def momentum_against_range(least: float, most: float) -> float:
    """The smallest μ that is robust to curvatures from h_min to h_max."""
    root = math.sqrt(most / least)
    return ((root - 1) / (root + 1)) ** 2


class YellowFinMatched(Matched):
    """GEM with m ← μ_t·m − η·g for each worker; μ_t comes from the gradients of all workers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gradients: list[Values] = []
        self.curvature_range: list[tuple[float, float]] = []
        self.distances: list[float] = []
        self.wanted: list[float] = []

    def tuned(self, gradient: Values) -> float:
        """μ_t after one more gradient."""
        self.gradients.append(gradient)
        all_ = np.array(self.gradients)
        squares = (all_**2).sum(axis=1)
        self.curvature_range.append((squares[-WINDOW:].min(), squares[-WINDOW:].max()))
        self.distances.append(weighted(np.sqrt(squares)) / weighted(squares))
        least, most = weighted(self.curvature_range)
        variance = weighted(squares) - (weighted(all_) ** 2).sum()
        if len(all_) <= WINDOW:
            self.wanted.append(self.mu)
        else:
            against_noise = momentum_against_noise(weighted(self.distances), least, variance)
            self.wanted.append(min(MAX_MOMENTUM, max(momentum_against_range(least, most), against_noise)))
        return float(weighted(self.wanted))

    def displacement(self, worker: Worker, update: Values, eta: float, staleness: int) -> Values:
        return self.moment(worker.kept, update, eta, self.tuned(update))
