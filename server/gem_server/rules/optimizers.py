"""Optimizers that the server keeps for all workers together: one state for the run, and one step for each commit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from gem_api.layout import Vector

from gem_server.rules.base import MAX_MAGNITUDE, Buffers, largest, require
from gem_server.rules.fused import ADAM, GIVEN, LION, SGD
from gem_server.rules.make import make

_LOG_MAX_BETA = math.log(0.999999)  # of a moment in float32
_NOTHING: Vector = np.empty(0, np.float32)


class SharedOptimizer(ABC):
    """Turns each gradient into a step Δ. The compiled passes in `rules/fused.py` compute it; `rules/specification.py` has the
    equations in NumPy.

    Attributes:
        code: Which of the compiled steps it is.
        shared: Names of the float32 buffers of shape (P,) that it keeps for the run; they start at zero.
        decoupled: Whether it applies the run's weight decay here; if not, workers add the decay to their gradients.
        reach: ρ of `GemAhead`: how much of the other workers' next steps a step foretells.
    """

    code: ClassVar[int]
    shared: ClassVar[tuple[str, ...]] = ()
    decoupled: ClassVar[bool] = False
    reach: ClassVar[float] = 1.5

    @abstractmethod
    def largest(self, learning_rate: float) -> np.float32:
        """The largest |g| that it takes in."""

    def part(self, count: float, weight: float) -> float:
        """w/h, the part of a gradient that a commit of this weight counts as in its memory; h = (n + 1)/2."""
        return weight / ((count + 1) / 2)

    def scalars(self, age: float, count: float = 1, weight: float = 1.0, part: float = 1.0) -> tuple[float, ...]:
        """The numbers of its equations for a commit, in the order that its compiled step takes.

        Args:
            age: k, the sum of w/h over the commits so far, this one included.
            count: n: n commits together make a step of one optimizer that sees the mean of n gradients.
            weight: w: the gradient is the mean of that share of a whole batch, and remembered by that share.
            part: w/h; see `part`.
        """
        return (1 / math.sqrt(count),)  # an update that is a step already is multiplied by it

    def state(self, shared: Buffers) -> tuple[Vector, Vector]:
        """The buffers that the compiled step updates; an empty one if there is none."""
        first, second = [*(shared[name] for name in self.shared), _NOTHING, _NOTHING][:2]
        return first, second


@dataclass(frozen=True)
class Sgd(SharedOptimizer):
    """Δ = −η_t·g. No state."""

    code = SGD

    def largest(self, learning_rate: float) -> np.float32:
        return largest(learning_rate)


@dataclass(frozen=True)
class _WithMoments(SharedOptimizer):
    """An optimizer that remembers means of the gradients, with the weights β₁ and β₂ for what it remembers."""

    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= beta <= 0.99999, f"{name} must lie in [0, 0.99999], not {beta}")

    def part(self, count: float, weight: float) -> float:
        """w/h, but h is no longer than a float32 sum with the weight 1 − β₂^(w/h) still grows."""
        span, longest = (count + 1) / 2, weight * self._log / _LOG_MAX_BETA
        span = span if span < longest else longest
        return weight / span if span > 1 else weight

    @cached_property
    def _log(self) -> float:
        return math.log(max(self.beta2, 1e-9))

    def _betas(self, part: float) -> tuple[float, float, float, float]:
        """β₁^(w/h) and β₂^(w/h), each followed by what it leaves for the new gradient."""
        beta1, beta2 = self.beta1**part, self.beta2**part
        return beta1, 1 - beta1, beta2, 1 - beta2


@dataclass(frozen=True)
class Adam(_WithMoments):
    """Adam (Kingma & Ba 2014, arXiv 1412.6980), Algorithm 1. k = t + 1 counts the commits of all workers:

    m ← β₁·m + (1 − β₁)·g    v ← β₂·v + (1 − β₂)·g⊙g
    Δ = −η_t·m̂/(√v̂ + ε)      m̂ = m/(1 − β₁ᵏ)   v̂ = v/(1 − β₂ᵏ)

    With n > 1, ours, β₁ and β₂ become β₁^(1/h) and β₂^(1/h), and √v̂ becomes √(v̂ + (n − 1)·m̂⊙m̂). That is the n-th part
    of a step at the rate √n·η_t with the mean of n gradients, whose mean square is m̂⊙m̂ + (v̂ − m̂⊙m̂)/n.

    A gradient of the share w of a whole batch has 1/w of its variance, and w of its part in the memory: β^(w/h), and v takes
    in w·g⊙g.

    Weight decay is in the gradients: workers add it.
    """

    epsilon: float = 1e-8
    code = ADAM
    shared = ("first_moment", "second_moment")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1e-12 <= self.epsilon <= 1, f"the optimizer's epsilon must lie in [1e-12, 1], not {self.epsilon}")

    def largest(self, learning_rate: float) -> np.float32:
        return np.float32(1e18)  # it is squared

    def scalars(self, age: float, count: float = 1, weight: float = 1.0, part: float = 1.0) -> tuple[float, ...]:
        correct1, correct2 = 1 / (1 - self.beta1**age), 1 / (1 - self.beta2**age)
        beta1, rest1, beta2, rest2 = self._betas(part)
        return beta1, rest1, beta2, rest2 * weight, correct1, correct2, self.epsilon, count - 1


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay λ (Loshchilov & Hutter 2017, arXiv 1711.05101), Algorithm 2:

    Δ = −η_t·(m̂/(√v̂ + ε) + λ·θ_t)
    """

    decoupled = True


@dataclass(frozen=True)
class Lion(_WithMoments):
    """Lion (Chen et al. 2023, arXiv 2302.06675), Algorithm 2, with decoupled weight decay λ:

    Δ = −η_t·(sign(β₁·m + (1 − β₁)·g) + λ·θ_t)    m ← β₂·m + (1 − β₂)·g

    With n > 1, ours, β₁ and β₂ become β₁^(1/h) and β₂^(1/h), and the sign is divided by √n.
    """

    beta2: float = 0.99
    code = LION
    shared = ("first_moment",)
    decoupled = True

    def largest(self, learning_rate: float) -> np.float32:
        return np.float32(MAX_MAGNITUDE)

    def scalars(self, age: float, count: float = 1, weight: float = 1.0, part: float = 1.0) -> tuple[float, ...]:
        return (*self._betas(part), 1 / math.sqrt(count))


@dataclass(frozen=True)
class Workers(SharedOptimizer):
    """Δ is the change that a worker's own optimizer made to its parameters, divided by √n. The server keeps no state."""

    code = GIVEN
    decoupled = True
    reach = 0.5

    def largest(self, learning_rate: float) -> np.float32:
        return np.float32(MAX_MAGNITUDE)


OPTIMIZERS: Mapping[str, type[SharedOptimizer]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW, "lion": Lion, "worker": Workers}


def make_optimizer(optimizer: str, options: str) -> SharedOptimizer:
    """Makes the optimizer of that name. Raises ValueError for an unknown name or an invalid option; lists the valid ones."""
    require(optimizer in OPTIMIZERS, f"no optimizer is named {optimizer!r}: choose from {', '.join(OPTIMIZERS)}")
    return make(OPTIMIZERS[optimizer], options, {}, what="optimizer")
