"""Gradient Energy Matching in plain NumPy: the specification that `rules/fused.py` is tested against, bit by bit.

It defines the rule, and the server never runs it: the compiled kernel does the same arithmetic in one pass over memory.
"""

from __future__ import annotations

import math

import numpy as np
from gem_api.layout import Vector

FULLY = np.float32(1)  # the paper's rule: θ − s counts fully, whichever way θ has moved


def gem(
    theta: Vector, snapshot: Vector, moment: Vector, gradient: Vector,
    eta: np.float32, mu: np.float32, kappa: np.float32, epsilon: np.float32, pi_max: np.float32,
    convention: str = "after", against: np.float32 = FULLY,
) -> tuple[Vector, Vector, Vector, Vector]:  # fmt: skip
    """One commit of a worker with moment m and snapshot s; arrays are float32, of shape (P,).

    Returns:
        θ_{t+1}, the new s, the new m, and π.
    """
    delta = -eta * gradient
    moment = mu * moment + delta  # (24)
    divisor = abs(delta + epsilon) if convention == "reference" else abs(delta) + epsilon
    with np.errstate(divide="ignore", invalid="ignore"):
        pi = (kappa * abs(moment) - used(theta - snapshot, delta, against)) / divisor  # (19), (27)
    pi = np.clip(np.nan_to_num(pi, nan=0.0, posinf=np.inf), np.float32(0), pi_max)  # 0/0 counts as 0
    after = theta + pi * delta
    return after, after if convention == "after" else theta, moment, pi


def used(moved: Vector, delta: Vector, against: np.float32) -> Vector:
    """How much of a commit's room the others have used who moved θ by `moved` since the worker's snapshot, float32, shape (P,):
    what goes against Δ counts `against` times."""
    return abs(moved) * np.where((moved < 0) == (delta < 0), np.float32(1), against)


def spanned(count: int, beta2: float) -> float:
    """h = (n + 1)/2, but so that β₂^(1/h) is at most 0.999999: a float32 sum with a smaller weight does not grow."""
    return max(1.0, min((count + 1) / 2, math.log(max(beta2, 1e-9)) / math.log(0.999999)))


def adam(
    theta: Vector, first: Vector, second: Vector, gradient: Vector, age: float, count: int,
    eta: np.float32, beta1: float, beta2: float, epsilon: np.float32, decay: np.float32,
) -> tuple[Vector, Vector, Vector]:  # fmt: skip
    """The step of Adam, or with a weight decay of AdamW: Δ and both new moments. With n = `count`, h = (n + 1)/2 and
    `age`, k, is the sum of 1/h over the commits so far, this one included. With n = 1 it is the papers' step."""
    f, span = np.float32, spanned(count, beta2)
    correct1, correct2 = 1 / (1 - beta1**age), 1 / (1 - beta2**age)
    beta1, beta2 = beta1 ** (1 / span), beta2 ** (1 / span)
    first = f(beta1) * first + f(1 - beta1) * gradient
    second = f(beta2) * second + f(1 - beta2) * gradient * gradient
    mean = first * f(correct1)
    square = second * f(correct2) + f(count - 1) * (mean * mean)
    return -eta * (mean / (np.sqrt(square) + epsilon) + decay * theta), first, second


def lion(
    theta: Vector, moment: Vector, gradient: Vector, count: int,
    eta: np.float32, beta1: float, beta2: float, decay: np.float32,
) -> tuple[Vector, Vector]:  # fmt: skip
    """The step of Lion: Δ and the new moment. With n = `count` = 1 it is the paper's step."""
    f, span = np.float32, spanned(count, beta2)
    beta1, beta2 = beta1 ** (1 / span), beta2 ** (1 / span)
    sign = f(1 / np.sqrt(count)) * np.sign(f(beta1) * moment + f(1 - beta1) * gradient)
    return -eta * (sign + decay * theta), f(beta2) * moment + f(1 - beta2) * gradient


def match(
    theta: Vector, snapshot: Vector, delta: Vector, age: float, count: int,
    kappa: float, epsilon: np.float32, pi_max: np.float32, reach: float,
) -> tuple[Vector, Vector, Vector]:  # fmt: skip
    """Matches the step Δ of an optimizer, its own proxy, with n = `count`: θ_{t+1}, the new s, and π."""
    f = np.float32
    ahead = f(reach * (count - 1) * age / (age + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        pi = (f(kappa * np.sqrt(count)) * abs(delta) - abs(theta - snapshot)) / (abs(delta) + epsilon)
    pi = np.clip(np.nan_to_num(pi, nan=0.0, posinf=np.inf), f(0), pi_max)
    move = pi * delta
    return theta + move, theta + move + ahead * move, pi


def released(theta: Vector, source: Vector, ratio: float) -> Vector:
    """The s of a worker whose reply was held: `source` is the s of the last commit, which lies ahead of θ, and r = `ratio` says
    how far this one does."""
    return theta + np.float32(ratio) * (source - theta)
