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
    eta: float, mu: float, kappa: np.float32, epsilon: np.float32, pi_max: np.float32,
    convention: str = "after", against: np.float32 = FULLY, weight: float = 1.0,
) -> tuple[Vector, Vector, Vector, Vector]:  # fmt: skip
    """One commit of a worker with moment m and snapshot s; arrays are float32, of shape (P,). `weight` is the share of a whole
    batch that the gradient was computed on.

    Returns:
        θ_{t+1}, the new s, the new m, and π.
    """
    f = np.float32
    delta = -f(eta * weight) * gradient
    moment = f(mu**weight) * moment + delta  # (24)
    divisor = abs(delta + epsilon) if convention == "reference" else abs(delta) + epsilon
    with np.errstate(divide="ignore", invalid="ignore"):
        pi = (kappa * abs(moment) - used(theta - snapshot, delta, against)) / divisor  # (19), (27)
    pi = np.clip(np.nan_to_num(pi, nan=0.0, posinf=np.inf), f(0), pi_max)  # 0/0 counts as 0
    after = theta + pi * delta
    return after, after if convention == "after" else theta, moment, pi


def used(moved: Vector, delta: Vector, against: np.float32) -> Vector:
    """The part of a commit's room that the others have used who moved θ by `moved` since the worker's snapshot, float32, shape
    (P,): what goes against Δ counts `against` times."""
    return abs(moved) * np.where((moved < 0) == (delta < 0), np.float32(1), against)


def spanned(count: float, beta2: float, weight: float) -> float:
    """h = (n + 1)/2, but so that β₂^(w/h) is at most 0.999999: a float32 sum with a smaller weight does not grow."""
    return max(1.0, min((count + 1) / 2, weight * math.log(max(beta2, 1e-9)) / math.log(0.999999)))


def adam(
    theta: Vector, first: Vector, second: Vector, gradient: Vector, age: float, count: float,
    eta: float, beta1: float, beta2: float, epsilon: np.float32, decay: np.float32, weight: float = 1.0,
) -> tuple[Vector, Vector, Vector]:  # fmt: skip
    """The step of Adam, or with a weight decay of AdamW: Δ and both new moments. With n = `count`, h = (n + 1)/2 and `age`, k,
    is the sum of w/h over the commits so far, this one included; w is `weight`. With n = w = 1 it is the papers' step."""
    f, part = np.float32, weight / spanned(count, beta2, weight)
    correct1, correct2 = 1 / (1 - beta1**age), 1 / (1 - beta2**age)
    beta1, beta2 = beta1**part, beta2**part
    first = f(beta1) * first + f(1 - beta1) * gradient
    second = f(beta2) * second + f((1 - beta2) * weight) * gradient * gradient
    mean = first * f(correct1)
    square = second * f(correct2) + f(count - 1) * (mean * mean)
    return -f(eta) * (mean / (np.sqrt(square) + epsilon) + decay * theta), first, second


def lion(
    theta: Vector, moment: Vector, gradient: Vector, count: float,
    eta: float, beta1: float, beta2: float, decay: np.float32, weight: float = 1.0,
) -> tuple[Vector, Vector]:  # fmt: skip
    """The step of Lion: Δ and the new moment. With n = `count` = w = `weight` = 1 it is the paper's step."""
    f, part = np.float32, weight / spanned(count, beta2, weight)
    beta1, beta2 = beta1**part, beta2**part
    sign = f(1 / np.sqrt(count)) * np.sign(f(beta1) * moment + f(1 - beta1) * gradient)
    return -f(eta) * (sign + decay * theta), f(beta2) * moment + f(1 - beta2) * gradient


def match(
    theta: Vector, snapshot: Vector, delta: Vector, age: float, count: float, delay: float,
    kappa: float, epsilon: np.float32, pi_max: np.float32, reach: float, weight: float = 1.0, growth: float = 0.0,
) -> tuple[Vector, Vector, Vector]:  # fmt: skip
    """Matches the step Δ of an optimizer with a whole batch, its own proxy: θ_{t+1}, the new s, and π. n is `count`; `delay`
    sums the weights of the commits while the worker computed: n − 1 if all are 1."""
    f = np.float32
    room = 1 + (kappa * np.sqrt(count) - 1) * age / (age + growth) if growth else kappa * np.sqrt(count)
    ahead = f(reach * delay * age / (age + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        pi = (f(room) * abs(delta) - abs(theta - snapshot)) / (abs(delta) + epsilon)
    pi = np.clip(np.nan_to_num(pi, nan=0.0, posinf=np.inf), f(0), pi_max)
    move = pi * delta
    after = theta + f(weight) * move
    return after, after + ahead * move, pi


def average(mean: Vector, theta: Vector, decay: float) -> Vector:
    """The average of θ after a commit: a + (1 − β)·(θ − a), which is β·a + (1 − β)·θ; `decay` is β."""
    return mean + np.float32(1 - decay) * (theta - mean)


def released(theta: Vector, source: Vector, ratio: float) -> Vector:
    """The s of a worker whose reply was held: `source` is the s of the last commit, which lies ahead of θ, and r = `ratio` says
    how far this one does."""
    return theta + np.float32(ratio) * (source - theta)
