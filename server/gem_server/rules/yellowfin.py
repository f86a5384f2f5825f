"""YellowFin's momentum (Zhang & Mitliagkas 2017, arXiv 1706.03471): μ estimated from the gradients alone, with a local
quadratic model of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from types import MappingProxyType

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import Shared

BETA = 0.999  # of all running means
WINDOW = 20  # number of the latest gradients from which the range of curvatures is estimated
MAX_MOMENTUM = 0.999  # μ
_SUMS = ("count", "least", "most", "norm", "square", "distance", "momentum")
NUMBERS: Mapping[str, float] = MappingProxyType(
    {**dict.fromkeys(_SUMS, 0.0), **{f"curvature_{place}": 0.0 for place in range(WINDOW)}}
)


def tuned_momentum(gradient: Vector, shared: Shared, first: float) -> float:
    """Updates the running means with a gradient (float32, shape (P,)), and returns μ.

    Args:
        gradient: The gradient of one commit.
        shared: The running means: buffers "mean" and "mean_square", and NUMBERS.
        first: The value of μ until there is enough data to estimate it.

    All means are weighted by β^age, and corrected for bias by 1/(1 − β^k) after k commits.
    """
    numbers = shared.numbers
    numbers["count"] = max(0.0, numbers["count"]) + 1  # a checkpoint that was tampered with may hold any value
    unbiased = 1 - BETA ** numbers["count"]
    squares = gradient * gradient
    square = _total(squares)
    variance = _variance(gradient, squares, shared.buffers, unbiased)
    least, most = _curvatures(square, numbers, unbiased)
    distance = _distance(square, numbers, unbiased)
    if numbers["count"] <= WINDOW or min(least, variance, distance) <= 0:
        wanted = first
    else:
        wanted = min(MAX_MOMENTUM, max(_from_range(least, most), _from_noise(distance, least, variance)))
    return float(_mean(numbers, "momentum", wanted) / unbiased)


def _mean(numbers: dict[str, float], name: str, value: float) -> float:
    """Updates a running mean, and returns it without bias correction."""
    numbers[name] = BETA * numbers[name] + (1 - BETA) * value
    return numbers[name]


def _total(values: Vector) -> float:
    """The sum of the values. Not a dot product: BLAS adds in an order that depends on the machine, and a replay must give
    identical bits."""
    return float(values.sum(dtype=np.float64))


def _variance(gradient: Vector, squares: Vector, buffers: dict[str, Vector], unbiased: float) -> float:
    """C = Σ(E[g⊙g] − E[g]⊙E[g]), the noise of one gradient (Algorithm 3)."""
    mean, mean_square, share = buffers["mean"], buffers["mean_square"], np.float32(1 - BETA)
    mean += share * (gradient - mean)
    mean_square += share * (squares - mean_square)
    return _total(mean_square) / unbiased - _total(mean * mean) / unbiased**2


def _curvatures(square: float, numbers: dict[str, float], unbiased: float) -> tuple[float, float]:
    """h_min and h_max: running means of the smallest and the largest ‖g‖² of the last gradients (Algorithm 2)."""
    numbers[f"curvature_{int(numbers['count'] - 1) % WINDOW}"] = square
    window = [numbers[f"curvature_{place}"] for place in range(min(WINDOW, int(numbers["count"])))]
    return _mean(numbers, "least", min(window)) / unbiased, _mean(numbers, "most", max(window)) / unbiased


def _distance(square: float, numbers: dict[str, float], unbiased: float) -> float:
    """D, the distance to the optimum: the running mean of E‖g‖/E[h] (Algorithm 4)."""
    norm, curvature = _mean(numbers, "norm", sqrt(square)), _mean(numbers, "square", square)
    return _mean(numbers, "distance", norm / curvature if curvature > 0 else 0.0) / unbiased


def _from_range(least: float, most: float) -> float:
    """The smallest μ that is robust to the range of curvatures: ((√κ − 1)/(√κ + 1))², κ = h_max/h_min (Eq. 9)."""
    root = sqrt(most / least)
    return ((root - 1) / (root + 1)) ** 2


def _from_noise(distance: float, least: float, variance: float) -> float:
    """The μ that minimises μ·D² + α²·C with α = (1 − √μ)²/h_min (Eq. 15): x = √μ solves p·x = (1 − x)³, p = D²·h_min²/(2C)."""
    # Beyond these bounds μ is within a millionth of 0 or 1, and the subtraction below would lose all digits.
    p = min(1e12, max(1e-30, (distance * least) ** 2 / (2 * variance)))
    w = -np.cbrt((sqrt(p * p + 4 / 27 * p**3) + p) / 2)  # Cardano's: y³ + p·y + p = 0 for y = x − 1
    return float((w - p / (3 * w) + 1) ** 2)
