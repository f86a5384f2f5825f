"""Delay-compensated asynchronous SGD (Zheng et al. 2016, arXiv 1609.08326)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import ArrayRule, Buffers, RuleInput, largest, require, require_rate

_EPSILON = np.float32(1e-7)


@dataclass(frozen=True)
class DcAsgd(ArrayRule):
    """Corrects each gradient for the movement of θ since it was computed, with g⊙g as an estimate of the Hessian's diagonal.

    θ_{t+1} = θ_t − η·(g + λ_t·g⊙g⊙(θ_t − s))                            (Eq. 10; s is the θ that g was computed on)
    DC-ASGD-c    λ_t = λ
    DC-ASGD-a    λ_t = λ/√(v + ε),   v ← m·v + (1 − m)·g⊙g, with m > 0    (Eq. 14)

    The factor after η is clipped to the bound that the server sets for a gradient's elements. Without that, a few large
    gradients would make θ infinite, as λ_t·g⊙g⊙(θ_t − s) has no bound. m = 0 selects DC-ASGD-c; for the paper's m = 0, use
    1e-9.
    """

    learning_rate: float = 0.05
    compensation: float = 0.04
    mean_square: float = 0.0
    name: ClassVar[str] = "dcasgd"
    by_element = True

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require(0 <= self.compensation <= 1e3, f"compensation (λ) must lie in [0, 1000], not {self.compensation}")
        require(0 <= self.mean_square < 1, f"mean_square (m) must lie in [0, 1), not {self.mean_square}; 0 for a constant λ")
        self.set_traits(shared=("mean_square",) if self.mean_square else ())

    @property
    def largest(self) -> np.float32:
        return np.float32(1e12)  # its square must stay a float32

    @cached_property
    def _bound(self) -> np.float32:
        return largest(self.learning_rate)

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        square = update * update
        correction = np.float32(self.compensation) * square
        if self.mean_square:
            v, m = rule_input.shared.buffers["mean_square"], np.float32(self.mean_square)
            v *= m
            v += (1 - m) * square
            correction /= np.sqrt(v + _EPSILON)
        with np.errstate(over="ignore"):  # an infinity is clipped
            correction *= theta - buffers["snapshot"]
        correction += update
        np.clip(correction, -self._bound, self._bound, out=correction)
        correction *= np.float32(self.learning_rate * rule_input.factor)
        theta -= correction
