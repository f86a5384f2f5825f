"""Gradient Energy Matching (Hermans & Louppe 2018, arXiv 1805.08469)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from gem_api.hyperparameters import SNAPSHOTS
from gem_api.layout import Layout, Vector

from gem_server.rules.base import (
    MAX_MOVE,
    NO_REPLY,
    Buffers,
    PiStatistics,
    RuleInput,
    require,
    require_momentum,
    require_uniform,
)
from gem_server.rules.fused import Scalars
from gem_server.rules.gem_pass import Step, match_energy
from gem_server.rules.gradient_rule import GradientRule
from gem_server.rules.proxies import PROXIES, Displacement, Momentum, Proxy


@dataclass(frozen=True)
class Gem(GradientRule):
    """Rescales each commit so that all workers together move θ with about the energy of sequential momentum SGD.

    `rules/specification.py` has these equations in NumPy.

        Δ = −η·g
        m ← μ·m·η_t/η' + Δ                                      (Eq. 24; `proxy` names others, in `rules/proxies.py`)
        π = clip((κ|m| − |θ_t − s|) / (|Δ| + ε), 0, π_max)      (Eqs. 19, 27; the clip is the authors' code)
        θ_{t+1} = θ_t + π·Δ

    A gradient of the share w of a whole batch makes Δ = −η·w·g, and μ becomes μ^w.

    η' is η at the worker's last commit: the paper has no schedule. `reference` leaves it out.

    The snapshot s, by convention:
        after      s = θ_{t+1}, where the worker's next gradient is computed (Eq. 16 as written)
        paper      s = θ_t, and the next gradient is computed there (Algorithm 1)
        reference  s = θ_t, but the next gradient is computed at θ_{t+1}, and |Δ + ε| divides (the authors' code, which has
                   ε = 1e-12); the first s is the θ that the worker pulls before its first commit

    With another optimizer than SGD it is the rule of `rules/gem_ahead.py`.

    `against`, ours: |θ_t − s| counts that many times, at most once, if θ has moved against Δ. In the paper a commit that would
    take back what the others have overdone is held back like one that adds to it (docs/results/many-workers).
    """

    momentum: float = 0.9
    kappa: float = 1.0
    epsilon: float = 1e-16
    pi_max: float = 5.0
    snapshot: str = "after"
    proxy: str = "momentum"
    proxy_rate: float = 0.0
    against: float = 1.0
    name: ClassVar[str] = "gem"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_momentum(self.momentum)
        require(0 < self.kappa <= 1e3, f"kappa must be above 0 and at most 1000, not {self.kappa}")
        require(1e-30 <= self.epsilon <= 1, f"epsilon must lie in [1e-30, 1], not {self.epsilon}")
        require(1e-3 <= self.pi_max <= 1e6, f"pi-max must lie in [0.001, 1e6], not {self.pi_max}")
        require(self.snapshot in SNAPSHOTS, f"the snapshot convention is one of {', '.join(SNAPSHOTS)}, not {self.snapshot!r}")
        require(self.proxy in PROXIES, f"the proxy is one of {', '.join(PROXIES)}, not {self.proxy!r}")
        if self.proxy_rate:
            require(1e-30 <= self.proxy_rate <= 1e3, f"proxy_rate must be 0 or lie in [1e-30, 1000], not {self.proxy_rate}")
        require(0 <= self.against <= 1, f"against must lie in [0, 1], not {self.against}")
        proxy, by_momentum = self._proxy, isinstance(self._proxy, Momentum)
        mine = (*proxy.buffers, "snapshot")
        self.set_traits(
            buffers=(*mine, "answer") if self._by_reference else mine,
            numbers=proxy.numbers,
            temporaries=proxy.temporaries,
            reads_once=by_momentum,
            weighs=by_momentum,
            by_element=proxy.by_element,
            reply_buffer="answer" if self._by_reference else "snapshot",
            replies_before=self.snapshot == "paper",
            replies_may_wait=self.snapshot == "after",  # else s is the θ of the worker's own commit
        )

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._proxy.shared

    @property
    def _by_reference(self) -> bool:
        return self.snapshot == "reference"

    @cached_property
    def largest(self) -> np.float32:
        bounded = MAX_MOVE / (self.learning_rate * self.pi_max)  # π_max·|Δ| must not exceed MAX_MOVE
        plain = np.float32(min(float(self._optimizer.largest(self.learning_rate)), bounded))
        return plain if self.reads_once else min(plain, np.float32(1e12))  # other proxies square it

    @cached_property
    def _sgd_numbers(self) -> Vector:
        return self._numbers(RuleInput(0))  # the same for every commit

    @cached_property
    def _proxy(self) -> Proxy:
        return PROXIES[self.proxy](self.momentum, self.proxy_rate)

    def _scalars(self, eta: float, displacement: Displacement) -> Scalars:
        inside, outside = (self.epsilon, 0.0) if self._by_reference else (0.0, self.epsilon)
        return Scalars(
            eta=eta,
            mu=displacement.carry,
            own=displacement.own,
            kappa=self.kappa,
            inside=inside,
            outside=outside,
            pi_max=self.pi_max,
            limit=self.largest,
            against=self.against,
        )

    def pull(self, theta: Vector, buffers: Buffers) -> None:
        # In this convention s changes only with the worker's own commits, once it has made one.
        super().pull(theta, {"answer": buffers["answer"]} if self._by_reference else buffers)

    def first_pull(self, theta: Vector, buffers: Buffers) -> None:
        super().pull(theta, buffers)

    def apply(self, layout: Layout, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> PiStatistics:
        eta = self.learning_rate * rule_input.factor * rule_input.weight
        if self._by_reference:
            rule_input = replace(rule_input, eta_change=1.0)
        displacement = self._proxy.displacement(update, eta, buffers, rule_input)
        moments = (displacement.moment, NO_REPLY)
        step = Step(moments, self._optimizer.code, self._sgd_numbers, self._decay, self._bound(self.pi_max))
        scalars = self._scalars(eta, displacement)
        facts = match_energy(self.threads, layout, theta, update, buffers, step, scalars, self.snapshot)
        self._proxy.matched(displacement, eta, rule_input)
        return facts

    @property
    def caution(self) -> str:
        length = 1 / (1 - self.momentum)
        if not isinstance(self._proxy, Momentum) or 2.1 * self.pi_max > length:
            return ""
        return (
            f"a momentum of {self.momentum:g} is up to {length:.0f} steps long, and pi_max={self.pi_max:g} cuts it: a few "
            f"workers will be slow; set pi_max to {length / 2:.0f} or more, or a smaller momentum"
        )

    def require_fitting(self, layout: Layout) -> None:
        if not self.reads_once:
            require_uniform(layout, f"the proxy {self.proxy}")
