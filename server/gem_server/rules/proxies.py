"""The proxies of Gradient Energy Matching: all workers together should move θ with the energy of such an optimizer. The paper's
§3.1 allows any.

A moment m holds steps, −η·g. When a schedule changes η, it changes m alike: steps are then as those of PyTorch's momentum,
which holds gradients. Without that, m stays too large for 1/(1 − μ) rounds after η falls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from gem_api.layout import Vector
from gem_api.schedule import eta_change

from gem_server.rules.base import Buffers, RuleInput
from gem_server.rules.yellowfin import NUMBERS, tuned_momentum

MOMENTS = 8  # number of moments that the proxy `global` keeps
_NONE: Mapping[str, float] = MappingProxyType({})


class Displacement(NamedTuple):
    """The proxy's movement in one step: carry·moment + own·Δ. The fused kernel computes it, and stores it in `moment`
    (float32, shape (P,))."""

    moment: Vector
    carry: float
    own: float = 1.0


class Proxy(ABC):
    """A proxy: its state, and how far it would move.

    Args:
        momentum: μ, for proxies that have one.
        rate: A fixed learning rate, for proxies that take one; 0: η_t.

    Attributes:
        buffers, shared, numbers, temporaries, by_element: As for a rule.
    """

    buffers: tuple[str, ...] = ("moment",)
    shared: tuple[str, ...] = ()
    numbers: Mapping[str, float] = _NONE
    temporaries: int = 0
    by_element: bool = True

    def __init__(self, momentum: float, rate: float) -> None:
        self.momentum = momentum
        self.rate = rate

    @abstractmethod
    def displacement(self, gradient: Vector, eta: float, buffers: Buffers, rule_input: RuleInput) -> Displacement:
        """Updates the proxy with a worker's gradient (float32, shape (P,)), and returns its displacement. Δ = −η·g; `buffers`
        are the worker's."""

    def matched(self, displacement: Displacement, eta: float, rule_input: RuleInput) -> None:  # noqa: B027  most need nothing
        """Called after the kernel: `displacement.moment` holds the displacement."""


class Momentum(Proxy):
    """m ← μ^w·m + Δ (Eq. 24, which has w = 1), for each worker: the step of sequential momentum SGD. The default."""

    def displacement(self, gradient: Vector, eta: float, buffers: Buffers, rule_input: RuleInput) -> Displacement:
        return Displacement(buffers["moment"], self.momentum**rule_input.weight * rule_input.eta_change)


class Nesterov(Proxy):
    """m ← μ·m + Δ, and the step is μ·m + Δ: Nesterov's momentum (Sutskever et al. 2013, ICML)."""

    temporaries = 1

    def displacement(self, gradient: Vector, eta: float, buffers: Buffers, rule_input: RuleInput) -> Displacement:
        moment = buffers["moment"]
        moment *= np.float32(self.momentum * rule_input.eta_change)
        moment += np.float32(-eta) * gradient
        return Displacement(moment.copy(), self.momentum)


class Adam(Proxy):
    """The step of Adam (Kingma & Ba 2014, arXiv 1412.6980), for each worker; k is the number of its commits so far:

        m ← μ·m + (1 − μ)·g          v ← 0.999·v + 0.001·g⊙g
        step = −η_t·m̂/(√v̂ + 1e-8)    m̂ = m/(1 − μ^{k+1})   v̂ = v/(1 − 0.999^{k+1})

    This step does not shrink with the gradient, so π must be large for small Δ: the default of pi_max with it is 1e6. The
    setting `proxy_rate` replaces η_t.
    """

    buffers = ("moment", "square")
    temporaries = 3

    def displacement(self, gradient: Vector, eta: float, buffers: Buffers, rule_input: RuleInput) -> Displacement:
        moment, square, mu, beta, count = buffers["moment"], buffers["square"], self.momentum, 0.999, rule_input.commits + 1
        moment *= np.float32(mu)
        moment += np.float32(1 - mu) * gradient
        square *= np.float32(beta)
        square += np.float32(1 - beta) * gradient * gradient
        step = moment * np.float32(-(self.rate or eta) / (1 - mu**count))
        step /= np.sqrt(square * np.float32(1 / (1 - beta**count))) + np.float32(1e-8)
        return Displacement(step, 1.0, 0.0)


class Global(Proxy):
    """A few moments for all workers, each like the moment of one hypothetical worker: O(P) memory instead of O(n·P).

        m̃ = μ·m_k + Δ                       the proxy of this commit; k is chosen pseudo-randomly for each commit
        m_k ← m̃  once in τ + 1 commits      a round: as many commits as there are workers (E[τ] = n − 1)

    A worker's own moment accumulates one gradient of each round, and so does each m_k: both have the same distribution. A
    moment that accumulated every commit would contain the same commits as θ − s: |m| and |θ − s| would rise and fall together,
    and their difference would be near 0. One moment is not enough either: every commit of a round would see the same |m|, and
    once |θ − s| has reached it, π would be 0 until the round ends.
    """

    buffers = ()
    shared = tuple(f"moment_{number}" for number in range(MOMENTS))
    numbers = MappingProxyType({f"{name}_{number}": 0.0 for name in ("since", "eta") for number in range(MOMENTS)})
    temporaries = 1

    def displacement(self, gradient: Vector, eta: float, buffers: Buffers, rule_input: RuleInput) -> Displacement:
        shared, drawn = rule_input.shared, _drawn(rule_input.version)
        before = shared.numbers[f"eta_{drawn}"]  # 0 if the moment holds nothing, or in a checkpoint of an earlier release
        return Displacement(shared.buffers[f"moment_{drawn}"].copy(), self.momentum * eta_change(eta, before))

    def matched(self, displacement: Displacement, eta: float, rule_input: RuleInput) -> None:
        numbers, drawn = rule_input.shared.numbers, _drawn(rule_input.version)
        for number in range(MOMENTS):
            numbers[f"since_{number}"] += 1
        if numbers[f"since_{drawn}"] > rule_input.staleness:
            np.copyto(rule_input.shared.buffers[f"moment_{drawn}"], displacement.moment)
            numbers[f"since_{drawn}"], numbers[f"eta_{drawn}"] = 0.0, eta


def _drawn(version: int) -> int:
    """The number k of the moment for the commit at this version. It is evenly spread over versions (Fibonacci hashing: Knuth,
    TAOCP 3, 6.4), and the same in a replay."""
    return (version * 2654435761 & 0xFFFFFFFF) * MOMENTS >> 32


class TunedMomentum(Proxy):
    """m ← μ_t·m + Δ for each worker; YellowFin estimates μ_t from the gradients of all workers."""

    shared = ("mean", "mean_square")
    numbers = NUMBERS
    temporaries = 3
    by_element = False  # YellowFin measures the norm of the whole gradient

    def displacement(self, gradient: Vector, eta: float, buffers: Buffers, rule_input: RuleInput) -> Displacement:
        mu = tuned_momentum(gradient, rule_input.shared, self.momentum)
        return Displacement(buffers["moment"], mu * rule_input.eta_change)


PROXIES: dict[str, Callable[[float, float], Proxy]] = {
    "momentum": Momentum, "nesterov": Nesterov, "adam": Adam, "global": Global, "yellowfin": TunedMomentum,
}  # fmt: skip
