"""FedBuff (Nguyen et al. 2021, arXiv 2106.06639)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import MAX_MOVE, ArrayRule, Buffers, RuleInput, require, require_rate


@dataclass(frozen=True)
class FedBuff(ArrayRule):
    """Sums K deltas, each weighted by its staleness, then moves θ by their mean.

        b ← b + δ/√(1 + τ')                                   each commit
        θ_{t+1} = θ_t + η_g·b/K,   b ← 0                      each K-th commit, else θ_{t+1} = θ_t

    τ' is the staleness in moves of θ, as in the paper: one move for K commits.
    """

    learning_rate: float = 0.05
    buffer_size: int = 10
    outer_rate: float = 1.0
    name: ClassVar[str] = "fedbuff"
    kind = "delta"
    temporaries = 1
    shared = ("gathered",)

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require(1 <= self.buffer_size <= 1_000_000, f"buffer_size (K) must lie in [1, 1000000], not {self.buffer_size}")
        require(0 < self.outer_rate <= 1e3, f"outer_rate (η_g) must lie in (0, 1000], not {self.outer_rate}")

    def scale(self, rule_input: RuleInput, pi: object = None) -> float:
        """1/√(1 + τ'): the weight of a delta."""
        moves = rule_input.version // self.buffer_size - (rule_input.version - rule_input.staleness) // self.buffer_size
        return 1 / sqrt(1 + moves)

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        gathered = rule_input.shared.buffers["gathered"]
        gathered += np.float32(self.scale(rule_input)) * update
        if (rule_input.version + 1) % self.buffer_size == 0:
            gathered *= np.float32(self.outer_rate / self.buffer_size)
            np.clip(gathered, -MAX_MOVE, MAX_MOVE, out=gathered)
            theta += gathered
            gathered[:] = 0
