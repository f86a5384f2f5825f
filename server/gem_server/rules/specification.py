"""Gradient Energy Matching in plain NumPy: the specification that `rules/fused.py` is tested against, bit by bit.

It defines the rule, and the server never runs it: the compiled kernel does the same arithmetic in one pass over memory.
"""

from __future__ import annotations

import numpy as np
from gem_api.layout import Vector


def gem(
    theta: Vector, snapshot: Vector, moment: Vector, gradient: Vector,
    eta: np.float32, mu: np.float32, kappa: np.float32, epsilon: np.float32, pi_max: np.float32,
    convention: str = "after",
) -> tuple[Vector, Vector, Vector, Vector]:  # fmt: skip
    """One commit of a worker with moment m and snapshot s; arrays are float32, of shape (P,).

    Returns:
        θ_{t+1}, the new s, the new m, and π.
    """
    delta = -eta * gradient
    moment = mu * moment + delta  # (24)
    divisor = abs(delta + epsilon) if convention == "reference" else abs(delta) + epsilon
    with np.errstate(divide="ignore", invalid="ignore"):
        pi = (kappa * abs(moment) - abs(theta - snapshot)) / divisor  # (19), (27)
    pi = np.clip(np.nan_to_num(pi, nan=0.0, posinf=np.inf), np.float32(0), pi_max)  # 0/0 counts as 0
    after = theta + pi * delta
    return after, after if convention == "after" else theta, moment, pi
