"""The norm of a gradient, and an optional bound on it relative to the run's own history.

The reference is the median of the latest accepted norms. It follows the run down and up over orders of magnitude, and a few
poisoned commits do not move it. The bound is a ratio, so it does not depend on the model's scale. Since Δ = −η·g, a bound on
‖g‖ also bounds ‖Δ‖.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

import numpy as np
from gem_api.compiled import compiled
from gem_api.errors import NormOutOfBounds
from gem_api.layout import Vector

WINDOW = 100  # the reference is the median of this many norms
MIN_NORMS = 20  # nothing is rejected before this many norms: a run's first norms vary most


class GradientNorm:
    """‖g‖₂ of a gradient that arrives in pieces, each finite, summed in float64: float32 would overflow from 1.8e19 on.

    The order of the pieces does not matter, and several threads may add some: the sum of their sums is exact."""

    def __init__(self) -> None:
        self._squares: list[float] = []

    def add(self, piece: Vector) -> None:
        """Adds one piece (float32, shape (n,))."""
        self._squares.append(sum_of_squares(piece))

    @property
    def value(self) -> float:
        """The norm of all pieces so far."""
        return math.sqrt(math.fsum(self._squares))


class NormHistory:
    """The latest accepted norms of a run, and the bound on the next one.

    Args:
        ratio: The bound, as a multiple of the history's median; 0 for no bound.

    Raises:
        ValueError: The ratio is below 1, which would reject every second commit.
    """

    def __init__(self, ratio: float = 0.0) -> None:
        if ratio and not ratio >= 1:
            raise ValueError(f"max_norm_ratio {ratio:g} would reject ordinary commits: give 1 or more, or 0 for no bound")
        self._ratio = ratio
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def bounded(self) -> bool:
        """Whether there is a bound; only then do norms have to be computed."""
        return self._ratio > 0

    @property
    def norms(self) -> list[float]:
        """The history, oldest first."""
        return list(self._norms)

    def resume(self, norms: Iterable[float]) -> None:
        """Restores the history from a checkpoint, oldest first."""
        self._norms.extend(float(norm) for norm in norms)

    def judge(self, norm: float) -> None:
        """Raises NormOutOfBounds if a norm exceeds the bound. Does not change the history."""
        if not self.bounded or len(self._norms) < MIN_NORMS:
            return
        reference = median(self._norms)
        if norm > self._ratio * reference:
            raise NormOutOfBounds(
                f"the gradient's norm {norm:.3g} is {norm / reference:.3g} times the median of the run's last "
                f"{len(self._norms)} commits; the bound is {self._ratio:g} (max_norm_ratio). The model is unchanged: check "
                "this worker's data, and how it scales its loss"
            )

    def accepted(self, norm: float) -> None:
        """Adds the norm of an accepted commit. A norm of 0 is left out: it says nothing about the run's scale."""
        if norm > 0:
            self._norms.append(norm)


@compiled(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def sum_of_squares(values):  # type: ignore[no-untyped-def]
    """Σv² of float32 values, in float64. The order of the sum is not fixed, so that the loop vectorises."""
    total = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total
