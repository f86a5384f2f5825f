"""DANA: asynchronous SGD whose workers have Nesterov's momentum and look ahead (Hakimi et al. 2019, arXiv 1907.11612)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import ArrayRule, Buffers, RuleInput, largest, require_momentum, require_rate


@dataclass(frozen=True)
class Dana(ArrayRule):
    """Each worker has a momentum of its own, and computes its gradient where all momenta together will have taken θ.

    m ← μ·m + g
    θ_{t+1} = θ_t − η·(g + μ·m)                            (DANA-Slim)

    In the paper's first form (DANA-Zero) θ' moves by −η·m, and a worker gets θ' − η·μ·Σ m over all workers. That point is the
    θ of this form, which needs no sum over the workers.
    """

    learning_rate: float = 0.05
    momentum: float = 0.9
    name: ClassVar[str] = "dana"
    buffers = ("moment", "snapshot")
    temporaries = 1
    by_element = True

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require_momentum(self.momentum)

    @property
    def largest(self) -> np.float32:
        return largest(max(1.0, self.learning_rate) / (1 - float(np.float32(self.momentum))))  # |m| ≤ |g|/(1 − μ)

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        moment, mu = buffers["moment"], np.float32(self.momentum)
        moment *= mu
        moment += update
        step = mu * moment
        step += update
        step *= np.float32(self.learning_rate * rule_input.factor)
        theta -= step
