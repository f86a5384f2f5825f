"""The base of rules that move θ by the step of an optimizer: plain SGD, or one that the server keeps for all workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from gem_api.layout import Layout, Vector
from gem_api.update_kind import UpdateKind

from gem_server.rules.base import MAX_MOVE, RuleInput, UpdateRule, require_rate
from gem_server.rules.optimizers import SharedOptimizer, make_optimizer


@dataclass(frozen=True)
class GradientRule(UpdateRule):
    """A rule for the step Δ that an optimizer takes with a worker's gradient. All workers share one state of the optimizer.

    With learning-rate factors f and decay factors d of the layout's tensors, η_t is f·η_t and the weight decay λ is d·λ.
    """

    learning_rate: float = 0.05
    optimizer: str = "sgd"
    optimizer_options: str = ""
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_rate(self.learning_rate)
        _ = self._optimizer  # raises ValueError for a wrong one

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._optimizer.shared

    @cached_property
    def largest(self) -> np.float32:
        return self._optimizer.largest(self.learning_rate) if self.kind == "gradient" else super().largest

    @cached_property
    def _optimizer(self) -> SharedOptimizer:
        return make_optimizer(self.optimizer, self.optimizer_options)

    @property
    def kind(self) -> UpdateKind:  # type: ignore[override]
        return "delta" if self.optimizer == "worker" else "gradient"

    def require_fitting(self, layout: Layout) -> None:
        """Any layout: the compiled passes take each tensor's own learning rate."""

    @property
    def _is_sgd(self) -> bool:
        return self.optimizer == "sgd"

    @cached_property
    def _decay(self) -> np.float32:
        """λ, if it is applied here and not by the workers."""
        return np.float32(self.weight_decay if self._optimizer.decoupled else 0.0)

    @staticmethod
    @cache
    def _bound(factor: float) -> np.float32:
        """The largest |Δ|, if up to `factor` times Δ is applied."""
        return np.float32(MAX_MOVE / max(1.0, factor))

    def _numbers(self, rule_input: RuleInput) -> Vector:
        """The numbers of the optimizer's step for this commit."""
        return np.array(self._optimizer.scalars(rule_input.version + 1), np.float32)
