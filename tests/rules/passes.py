"""A rule on its own: θ and the buffers of a few workers, as a server holds them, and gradients to commit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gem_api.layout import Layout, Vector
from gem_server.rules import PiStatistics, RuleInput, Shared, UpdateRule
from kit.core import bits


def gradient(random: np.random.Generator, size: int) -> Vector:
    """Gradients of many magnitudes, with zeros, so that π is clipped on both sides."""
    values = random.normal(size=size) * 10.0 ** random.uniform(-4, 1, size=size) * (random.random(size) > 0.1)
    return values.astype(np.float32)


@dataclass
class Run:
    """A rule, θ and the buffers of a few workers: a server without the server."""

    rule: UpdateRule
    theta: Vector
    workers: list[dict[str, Vector]] = field(default_factory=list)
    shared: Shared = field(default_factory=Shared)
    version: int = 0

    @classmethod
    def of(cls, rule: UpdateRule, theta: Vector, workers: int = 1, *, answered: bool = False) -> Run:
        """Workers that have just pulled θ, with a buffer for the answer or as the rule wants it."""
        run = cls(rule, theta.copy())
        run.shared = Shared({name: np.zeros(theta.size, np.float32) for name in rule.shared}, dict(rule.numbers))
        names = {*rule.buffers, "answer"} if answered else rule.buffers
        for _ in range(workers):
            buffers = {name: np.zeros(theta.size, np.float32) for name in names}
            rule.first_pull(run.theta, buffers)
            run.workers.append(buffers)
        return run

    def commit(
        self, gradient: Vector, worker: int = 0, staleness: int = 0, *, layout: Layout | None = None, factor: float = 1.0,
        weight: float = 1.0, passed: float | None = None,
    ) -> PiStatistics | None:  # fmt: skip
        rule_input = RuleInput(
            staleness, self.version, self.version, factor, len(self.workers), self.shared, weight=weight, passed=passed
        )
        self.version += 1
        layout = layout or Layout.of({"w": (self.theta.size,)})
        return self.rule.apply(layout, self.theta, gradient, self.workers[worker], rule_input)

    def state(self) -> bytes:
        return bits(self.theta) + b"".join(bits(buffer) for buffers in self.workers for buffer in buffers.values())
