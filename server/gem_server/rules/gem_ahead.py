"""Energy matching around an optimizer of the server's, against the movement of θ that was not foreseen. Ours; docs/method.md
derives it and measures its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from gem_api.layout import Layout, Vector

from gem_server.rules.base import Buffers, PiStatistics, RuleInput, require
from gem_server.rules.fused import Scalars
from gem_server.rules.gem_pass import Step, between, match_energy
from gem_server.rules.gradient_rule import GradientRule


@dataclass(frozen=True)
class GemAhead(GradientRule):
    """Sends each worker a point ahead of θ, where the others are taking it, and limits a commit by how far θ is from there.

    `rules/specification.py` has these equations in NumPy. With n = τ + 1, at most four for each worker, and h = (n + 1)/2:

        Δ = the n-th part of a step with the mean of n gradients        (`rules/optimizers.py`)
        π = clip((κ'·|Δ| − |θ_t − s|) / (|Δ| + ε), 0, π_max)              (Eqs. 19, 27; Δ is its own proxy)
        θ_{t+1} = θ_t + w·π·Δ
        s = θ_{t+1} + ρ·τ'·k/(k + 1)·π·Δ                                 what the worker gets, and computes its next gradient on

    k is the sum of w/h over the commits so far: the first steps foretell little. So κ' grows with it from 1 to κ·√n:
    κ' = 1 + (κ·√n − 1)·k/(k + `growth`).

    w is the share of a whole batch that g was computed on. If it is below 1, n is w and the sum of the others' w since the
    worker's last commit, instead of τ + 1. τ' is that sum without w, over the commits while the worker computed.

    n is how many commits shared the round that this gradient took: with equal workers their number. A fast worker among slow
    ones has a small n, and its commits count nearly as those of one alone. The bound is for a worker that was silent for long.
    A reply that was held is made when it is released, from the snapshot s' of the last commit: s = θ + r·(s' − θ), with r such
    that it lies ahead by the worker's own τ'. ρ is 1 at most then: those who wait commit together.

    One worker alone, without overlap, makes the optimizer's own steps: h = 1, s = θ and π = 1.

    θ itself is what evaluators, readers and checkpoints get.

    ρ = 1.5 and κ = 1.5 were found by trying (docs/method.md). If Δ is the step of a worker's own optimizer, it foretells less
    of what the others will do: ρ = 0.5.
    """

    kappa: float = 1.5
    epsilon: float = 1e-16
    pi_max: float = 1.0
    growth: float = 0.0
    name: ClassVar[str] = "gem"
    numbers = MappingProxyType({"age": -1.0})  # before the first commit
    reads_once = True
    by_element = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.kappa <= 1e3, f"kappa must be above 0 and at most 1000, not {self.kappa}")
        require(1e-30 <= self.epsilon <= 1, f"epsilon must lie in [1e-30, 1], not {self.epsilon}")
        require(1e-3 <= self.pi_max <= 1e6, f"pi-max must lie in [0.001, 1e6], not {self.pi_max}")
        require(0 <= self.growth <= 1e6, f"growth must lie in [0, 1e6], not {self.growth}")
        # The steps of a worker's own optimizer are as long for a smaller batch.
        self.set_traits(weighs=self.kind == "gradient")

    def apply(self, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> PiStatistics:
        count, weight = rule_input.count, rule_input.weight
        part = self._optimizer.part(count, weight)
        age = self._aged(rule_input, part)
        numbers = np.array(self._optimizer.scalars(age, count, weight, part), np.float32)
        moments = self._optimizer.state(rule_input.shared.buffers)
        step = Step(moments, self._optimizer.code, numbers, self._decay, self._bound(self.pi_max))
        ahead = self._optimizer.reach * rule_input.delay * age / (age + 1)
        scalars = self._scalars(self.learning_rate * rule_input.factor, self._room(count, age), ahead, weight)
        return match_energy(self.threads, layout, theta, update, buffers, step, scalars)

    def ahead(self, rule_input: RuleInput, released: bool = False) -> float:
        """In units of k/(k + 1) times the last step: until the next commit all workers have them in common."""
        reach = min(1.0, self._optimizer.reach) if released else self._optimizer.reach
        return reach * rule_input.delay

    def release(self, theta: Vector, buffers: Buffers, source: Vector | None, ratio: float) -> None:
        """s = θ + r·(s' − θ), with the snapshot s' that lies ahead of θ by the last step."""
        if source is None or not ratio:
            self.pull(theta, buffers)
            return
        between(self.threads, theta, source, ratio, buffers["snapshot"])
        if "answer" in buffers:
            np.copyto(buffers["answer"], buffers["snapshot"])

    def _aged(self, rule_input: RuleInput, part: float) -> float:
        """k, the sum of w/h over all commits with this one. A checkpoint of an earlier release has none: then h was 1."""
        numbers = rule_input.shared.numbers
        before = numbers.get("age", -1.0)
        age = numbers["age"] = (before if before >= 0 else rule_input.version) + part
        return age

    def _room(self, count: float, age: float) -> float:
        """κ': how many steps θ may be from where it was foreseen."""
        full = self.kappa * math.sqrt(count)
        return 1 + (full - 1) * age / (age + self.growth) if self.growth else full

    def _scalars(self, eta: float, room: float, ahead: float, share: float) -> Scalars:
        return Scalars(
            eta=eta,
            mu=0.0,
            own=0.0,
            kappa=room,
            inside=0.0,
            outside=self.epsilon,
            pi_max=self.pi_max,
            limit=self.largest,
            ahead=ahead,
            share=share,
        )
