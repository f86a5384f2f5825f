"""The two rules that GEM is compared with: neither looks at anything but the gradient and its staleness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from gem_api.layout import Layout, Vector

from gem_server.rules.base import NO_ANSWER, Buffers, PiFacts, UpdateRule, require_rate
from gem_server.rules.fused import descend_part


@dataclass(frozen=True)
class Downpour(UpdateRule):
    """Plain asynchronous SGD (Dean et al. 2012, NeurIPS 25).

    Δ = −η·g
    θ_{t+1} = θ_t + Δ
    """

    learning_rate: float = 0.05
    name: ClassVar[str] = "downpour"

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)

    def divisor(self, staleness: int) -> int:
        """What Δ is divided by for a commit of this staleness."""
        return 1

    def apply(self, layout: Layout, theta: Vector, gradient: Vector, buffers: Buffers, staleness: int) -> None:
        parts = self.threads.parts(theta.size)
        scalars = (np.float32(self.learning_rate), self.largest, np.float32(self.divisor(staleness)))
        arguments = (parts, theta, gradient, buffers["snapshot"], buffers.get("answer", NO_ANSWER), *scalars)
        self.threads.run(lambda part: descend_part(part, *arguments), parts)

    def scale(self, staleness: int, pi: PiFacts | None) -> float:
        return 1.0 / self.divisor(staleness)


@dataclass(frozen=True)
class Adaptive(Downpour):
    """Asynchronous SGD weighted by staleness: the baseline of the GEM paper, after Zhang et al. 2015, arXiv 1511.05950.

    Δ = −η·g
    θ_{t+1} = θ_t + Δ / (τ + 1)
    """

    name: ClassVar[str] = "adaptive"

    def divisor(self, staleness: int) -> int:
        return staleness + 1
