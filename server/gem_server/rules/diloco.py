"""Asynchronous DiLoCo: an outer optimizer with Nesterov momentum over deltas (Douillard et al. 2023, arXiv 2311.08105), and
delayed Nesterov (Liu et al. 2024, arXiv 2401.09135)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import MAX_MOVE, ArrayRule, Buffers, RuleInput, require, require_rate


@dataclass(frozen=True)
class DiLoCo(ArrayRule):
    """Treats a worker's delta as a gradient g = −δ, and applies it with Nesterov momentum and the learning rate ε.

        b ← b + g
        each N-th commit    m ← β·m + b/N,   θ_{t+1} = θ_t − ε·((1 − c·N + c)·β·m + g/N),   b ← 0
        else                θ_{t+1} = θ_t − ε·(c·β·m + g/N)                           (2401.09135, Algorithm 3)

    With N = 1 every commit is a step of DiLoCo's own outer optimizer. With many workers set N to about their number: momentum
    that is applied at every commit adds up.
    """

    learning_rate: float = 0.05
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    delay: int = 1
    eager: float = 0.0
    name: ClassVar[str] = "diloco"
    kind = "delta"
    temporaries = 2
    shared = ("momentum", "gathered")

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require(0 < self.outer_rate <= 1e3, f"outer_rate (ε) must lie in (0, 1000], not {self.outer_rate}")
        require(0 <= self.outer_momentum < 1, f"outer_momentum (β) must lie in [0, 1), not {self.outer_momentum}")
        require(1 <= self.delay <= 1_000_000, f"delay (N) must lie in [1, 1000000], not {self.delay}")
        require(0 <= self.eager * self.delay <= 1, f"eager (c) must lie in [0, 1/delay], not {self.eager}")
        self.set_traits(by_element=self.delay == 1)  # else the commits that a step gathers would differ between ranges

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        momentum, gathered = rule_input.shared.buffers["momentum"], rule_input.shared.buffers["gathered"]
        gathered -= update
        share = self.eager
        if (rule_input.version + 1) % self.delay == 0:
            momentum *= np.float32(self.outer_momentum)
            momentum += gathered / np.float32(self.delay)
            gathered[:] = 0
            share = 1 - self.eager * self.delay + self.eager
        step = np.float32(share * self.outer_momentum) * momentum
        step -= update / np.float32(self.delay)
        with np.errstate(over="ignore"):  # an infinity is clipped
            step *= np.float32(self.outer_rate)
        np.clip(step, -MAX_MOVE, MAX_MOVE, out=step)
        theta -= step
