"""FedAsync (Xie, Koyejo & Gupta 2019, arXiv 1903.03934)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import ArrayRule, Buffers, RuleInput, require, require_rate

_FUNCTIONS = ("constant", "polynomial", "hinge")


@dataclass(frozen=True)
class FedAsync(ArrayRule):
    """Mixes a worker's parameters into θ, with a weight that falls with their staleness.

        x = s + δ                             the worker's parameters after λ local steps from its snapshot s
        θ_{t+1} = (1 − α_τ)·θ_t + α_τ·x       α_τ = α·f(τ)
        f: constant      1
           polynomial    (τ + 1)^−a
           hinge         1 if τ ≤ b, else 1/(a·(τ − b) + 1)          (all in Section 5.2)

    The local steps omit the paper's proximal term.
    """

    learning_rate: float = 0.05
    mixing: float = 0.6
    staleness: str = "polynomial"
    a: float = 0.5
    b: float = 4.0
    name: ClassVar[str] = "fedasync"
    kind = "delta"
    by_element = True
    temporaries = 1

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require(0 < self.mixing <= 1, f"mixing (α) must lie in (0, 1], not {self.mixing}")
        require(self.staleness in _FUNCTIONS, f"staleness is one of {', '.join(_FUNCTIONS)}, not {self.staleness!r}")
        require(0 <= self.a <= 1e3 and 0 <= self.b <= 1e6, f"a lies in [0, 1000], b in [0, 1e6], not {self.a}, {self.b}")

    def scale(self, rule_input: RuleInput, pi: object = None) -> float:
        """α_τ: the weight of the worker's parameters."""
        late = rule_input.staleness - self.b
        if self.staleness == "polynomial":
            return float(self.mixing * (rule_input.staleness + 1.0) ** -self.a)
        if self.staleness == "hinge" and late > 0:
            return self.mixing / (self.a * late + 1)
        return self.mixing

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        way = buffers["snapshot"] + update
        way -= theta
        way *= np.float32(self.scale(rule_input))
        theta += way
