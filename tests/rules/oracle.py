"""A second implementation of the update rules, from the equations, in float32 and in NumPy's plainest operations.

Nothing here calls gem_server's rules. Numbers in brackets are equations of Hermans & Louppe 2018, arXiv 1805.08469.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gem_api.layout import Vector

F = np.float32
BINS = 256
BINS_PER_OCTAVE = 16


@dataclass
class Worker:
    """The server's state for one worker. Arrays are replaced, never changed."""

    moment: Vector
    snapshot: Vector
    answer: Vector
    base_version: int = 0
    commits: int = 0


@dataclass
class Facts:
    """The effects of one commit: τ, each parameter's π (NaN if Δ is 0), and the two kinetic energies in double precision."""

    staleness: int
    pi: Vector
    proxy_energy: float = 0.0
    central_energy: float = 0.0


class Oracle:
    """A parameter server reduced to its arithmetic.

    Args:
        rule: "gem", "downpour" or "adaptive".
        theta: The first value of the central variable.
        workers: Their names.
        settings: η, μ, κ, ε, π_max and the snapshot convention.
    """

    def __init__(
        self,
        rule: str,
        theta: Vector,
        workers: list[str],
        *,
        eta: float,
        mu: float = 0.0,
        kappa: float = 1.0,
        epsilon: float = 1e-16,
        pi_max: float = 5.0,
        snapshot: str = "after",
    ) -> None:
        self.rule = rule
        self.theta = theta.copy()
        self.eta, self.mu, self.kappa, self.epsilon, self.pi_max = F(eta), F(mu), F(kappa), F(epsilon), F(pi_max)
        self.convention = snapshot
        self.version = 0
        zero = np.zeros_like(theta)
        self.workers = {name: Worker(zero, zero, zero) for name in workers}

    def pull(self, name: str) -> None:
        worker = self.workers[name]
        worker.answer = self.theta
        worker.base_version = self.version
        if not (self.rule == "gem" and self.convention == "reference" and worker.commits):  # their worker pulls once, at first
            worker.snapshot = self.theta

    def commit(self, name: str, gradient: Vector) -> Facts:
        worker, before = self.workers[name], self.theta
        facts = Facts(self.version - worker.base_version, np.empty(0, F))  # (2)
        delta = -self.eta * gradient
        if self.rule == "gem":
            self._gem(worker, delta, facts)
        else:
            self.theta = before + delta / F(facts.staleness + 1 if self.rule == "adaptive" else 1)
        self.version += 1
        worker.commits += 1
        self._hand_over(worker, before)
        return facts

    def _gem(self, worker: Worker, delta: Vector, facts: Facts) -> None:
        theta, s = self.theta, worker.snapshot
        m = self.mu * worker.moment + delta  # (24)
        wanted = self.kappa * abs(m) - abs(theta - s)  # (27)
        by_reference = self.convention == "reference"  # the authors' code
        divisor = abs(delta + self.epsilon) if by_reference else abs(delta) + self.epsilon
        with np.errstate(all="ignore"):
            pi = np.clip(np.nan_to_num(wanted / divisor, nan=0.0, posinf=np.inf), F(0), self.pi_max)  # (19)
        self.theta, worker.moment = theta + pi * delta, m
        facts.pi = np.where(delta != 0, pi, F("nan"))
        facts.proxy_energy = float(0.5 * ((float(self.kappa) * m.astype(float)) ** 2).sum())  # (15)
        facts.central_energy = float(0.5 * ((self.theta.astype(float) - s) ** 2).sum())  # (16)

    def _hand_over(self, worker: Worker, before: Vector) -> None:
        """Sets the θ that the worker gets, and its snapshot."""
        worker.answer, worker.base_version = self.theta, self.version
        if self.rule == "gem" and self.convention == "paper":
            worker.answer, worker.base_version = before, self.version - 1
        by_reference = self.rule == "gem" and self.convention == "reference"
        worker.snapshot = before if by_reference else worker.answer


def bin_of(pi: Any, pi_max: float) -> Any:
    """The bin of each π, 16 to an octave and linear inside it; 0 and π_max have one each, and bin 1 has all below the rest."""
    pi, most = np.asarray(pi, F), F(pi_max)
    inside = np.maximum(1, _place(pi) - _place(most) + BINS - 2)
    return np.where(pi == 0, 0, np.where(pi == most, BINS - 1, inside))


def histogram(pi: Vector, pi_max: float) -> Any:
    """int64, shape (BINS,)."""
    return np.bincount(bin_of(with_pi(pi), pi_max), minlength=BINS)


def counted(size: int) -> list[int]:
    """The elements of a tensor of `size` that enter the histogram of π, as decision 0009 states it."""
    stride = 1
    while stride < 64 and size >= 2 * stride * 1024:
        stride *= 2
    return [at for at in range(size) if at % 2048 // 8 % stride == at // 2048 * 19 % stride]


def lower_median(pi: Vector) -> float:
    """The median: the middle element, or the lower of the two."""
    values = np.sort(with_pi(pi))
    return float(values[(values.size - 1) // 2]) if values.size else 0.0


def with_pi(pi: Vector) -> Vector:
    """Without the elements whose Δ is 0."""
    return pi[~np.isnan(pi)]


def _place(values: Any) -> Any:
    mantissa, exponent = np.frexp(values.astype(float))  # value = mantissa · 2^exponent, mantissa in [½, 1)
    return BINS_PER_OCTAVE * exponent + np.ceil((2 * mantissa - 1) * BINS_PER_OCTAVE).astype(int) - 1  # closed above
