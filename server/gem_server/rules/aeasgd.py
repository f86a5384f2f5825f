"""Asynchronous elastic averaging (Zhang, Choromanska & LeCun 2015, arXiv 1412.6651)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import ArrayRule, Buffers, RuleInput, require, require_rate


@dataclass(frozen=True)
class Aeasgd(ArrayRule):
    """Each worker has its own parameters x. Each commit moves x and θ towards each other, like a spring. x is the snapshot.

        x ← x + δ               the worker's λ local steps
        e = α·(x − θ_t)         Algorithm 1
        θ_{t+1} = θ_t + e
        x ← x − e               where the worker's next local steps begin

    The paper writes α = η·ρ, and uses α = 0.9/n for n workers. With momentum in the local steps (`local_momentum`) the rule
    is EAMSGD, Algorithm 2.
    """

    learning_rate: float = 0.05
    alpha: float = 0.1
    name: ClassVar[str] = "aeasgd"
    kind = "delta"
    by_element = True
    temporaries = 2
    replies_may_wait = False  # the reply is x, which the others' commits don't change

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        require(0 < self.alpha <= 1, f"alpha must lie in (0, 1], not {self.alpha}")

    def apply(self, layout: object, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        self.move(theta, update, buffers, rule_input)
        if "answer" in buffers:
            np.copyto(buffers["answer"], buffers["snapshot"])

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        x = buffers["snapshot"]
        x += update
        pull = np.float32(self.alpha) * (x - theta)
        theta += pull
        x -= pull

    def scale(self, rule_input: RuleInput, pi: object) -> float:
        return self.alpha
