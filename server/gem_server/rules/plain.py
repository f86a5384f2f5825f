"""The simplest rules to compare GEM with: they depend only on the update and its staleness."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from gem_api.layout import Layout, Vector
from gem_api.update_kind import UpdateKind

from gem_server.rules.base import NO_REPLY, Buffers, PiStatistics, RuleInput, require
from gem_server.rules.fused import GIVEN, descend_part
from gem_server.rules.gradient_rule import GradientRule

_MOST_SCALED = 100.0  # how many times Δ a rescaled commit moves θ at most


@dataclass(frozen=True)
class Downpour(GradientRule):
    """Plain asynchronous SGD (Dean et al. 2012, NeurIPS 25).

    θ_{t+1} = θ_t + Δ       Δ = −η·w·g, or the change that λ > 1 local steps made to the worker's parameters

    w is the share of a whole batch that g was computed on.

    With another optimizer, Δ is its step (`rules/optimizers.py`): plain asynchronous Adam, for example.
    """

    local_steps: int = 1
    name: ClassVar[str] = "downpour"
    reads_once = True
    by_element = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_step = self.optimizer in ("sgd", "worker") or self.local_steps == 1
        require(one_step, f"the server applies {self.optimizer} to gradients: it can't be combined with --local-steps above 1")

    @property
    def kind(self) -> UpdateKind:  # type: ignore[override]
        return "delta" if self.local_steps > 1 else super().kind

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return self._is_sgd and self.kind == "gradient"

    def divisor(self, rule_input: RuleInput) -> float:
        """The number that divides a commit's Δ."""
        return 1.0

    def apply(self, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        parts = self.threads.parts(theta.size)
        eta = self.learning_rate * rule_input.factor * rule_input.weight
        code = self._optimizer.code if self.kind == "gradient" else GIVEN
        arguments = (
            parts, theta, update, *self._optimizer.state(rule_input.shared.buffers), buffers["snapshot"],
            buffers.get("answer", NO_REPLY), layout.offsets, layout.factors, code, self._numbers(rule_input),
            np.float32(eta), self._decay, self.largest, self._bound(1.0), np.float32(self.divisor(rule_input)),
        )  # fmt: skip
        self.threads.run(lambda part: descend_part(part, *arguments), parts)

    def scale(self, rule_input: RuleInput, pi: PiStatistics | None) -> float:
        return 1.0 / self.divisor(rule_input)


@dataclass(frozen=True)
class Adaptive(Downpour):
    """Asynchronous SGD weighted by staleness: the baseline of the GEM paper, after Zhang et al. 2015, arXiv 1511.05950. With
    local steps it is DynSGD (Jiang et al. 2017, SIGMOD).

        θ_{t+1} = θ_t + Δ / (τ + 1)     Δ = −η·g, or the change that λ > 1 local steps made to the worker's parameters
    """

    name: ClassVar[str] = "adaptive"

    def divisor(self, rule_input: RuleInput) -> float:
        return rule_input.staleness + 1.0


@dataclass(frozen=True)
class Rescaled(Downpour):
    """Rescaled ASGD (Mahran, Maranjyan & Richtárik 2026, arXiv 2605.13434): all workers together move θ equally far, however
    fast each is.

        θ_{t+1} = θ_t + Δ·min((τ + 1)/n, 100)     Δ as above; n is the number of leases

    The paper scales a worker's η by its time for a gradient. Here τ + 1, the time in commits, stands for it: its mean is n.
    """

    name: ClassVar[str] = "rescaled"
    weighs = False  # a slow worker moves θ as far as a fast one

    def __post_init__(self) -> None:
        require(self._is_sgd, f"rule rescaled scales the steps of SGD: it can't be combined with --optimizer {self.optimizer}")
        super().__post_init__()

    @cached_property
    def largest(self) -> np.float32:
        return np.float32(super().largest / _MOST_SCALED)

    def divisor(self, rule_input: RuleInput) -> float:
        return 1 / min((rule_input.staleness + 1) / rule_input.workers, _MOST_SCALED)


@dataclass(frozen=True)
class Agn(Downpour):
    """Accumulated Gradient Normalization (Hermans, Spanakis & Möckel 2017, arXiv 1710.02368).

    ḡ = (1/λ)·Σ g_i         over the worker's λ local steps, each g_i at the worker's own parameters
    θ_{t+1} = θ_t − η·ḡ
    """

    local_steps: int = 4
    name: ClassVar[str] = "agn"
    weighs = False

    def __post_init__(self) -> None:
        require(self._is_sgd, f"rule agn averages the gradients of SGD: it can't be combined with --optimizer {self.optimizer}")
        super().__post_init__()

    @property
    def kind(self) -> UpdateKind:  # type: ignore[override]
        return "gradient"
