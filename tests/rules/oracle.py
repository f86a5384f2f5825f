"""A second implementation of the update rules: slow, one element and one float32 operation at a time, from the equations.

Nothing here calls gem_server's rules. Numbers in brackets are equations of Hermans & Louppe 2018, arXiv 1805.08469.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

F = np.float32
Floats = list[np.float32]
BINS = 256
BINS_PER_OCTAVE = 16


@dataclass
class Worker:
    """The server's state for one worker."""

    moment: Floats
    snapshot: Floats
    answer: Floats
    base_version: int = 0
    commits: int = 0


@dataclass
class Facts:
    """The effects of one commit: τ, each parameter's π (NaN if Δ is 0), and the two kinetic energies in double precision."""

    staleness: int
    pi: Floats = field(default_factory=list)
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
        theta: np.ndarray,
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
        self.theta: Floats = [F(value) for value in theta]
        self.eta, self.mu, self.kappa, self.epsilon, self.pi_max = F(eta), F(mu), F(kappa), F(epsilon), F(pi_max)
        self.convention = snapshot
        self.version = 0
        zero = [F(0)] * len(self.theta)
        self.workers = {name: Worker(list(zero), list(zero), list(zero)) for name in workers}

    def pull(self, name: str) -> None:
        worker = self.workers[name]
        worker.answer = list(self.theta)
        worker.base_version = self.version
        if not (self.rule == "gem" and self.convention == "reference" and worker.commits):  # their worker pulls once, at first
            worker.snapshot = list(self.theta)

    def commit(self, name: str, gradient: np.ndarray) -> Facts:
        worker = self.workers[name]
        facts = Facts(staleness=self.version - worker.base_version)  # (2)
        before = list(self.theta)
        with np.errstate(all="ignore"):
            for i, g in enumerate(gradient):
                if self.rule == "gem":
                    self._gem(worker, i, F(g), facts)
                elif self.rule == "downpour":
                    self.theta[i] = self.theta[i] + -self.eta * F(g)
                else:
                    self.theta[i] = self.theta[i] + (-self.eta * F(g)) / F(facts.staleness + 1)
        self.version += 1
        worker.commits += 1
        self._hand_over(worker, before)
        return facts

    def _gem(self, worker: Worker, i: int, g: np.float32, facts: Facts) -> None:
        theta, s = self.theta[i], worker.snapshot[i]
        delta = -self.eta * g
        m = self.mu * worker.moment[i] + delta  # (24)
        wanted = self.kappa * abs(m) - abs(theta - s)  # (27)
        by_reference = self.convention == "reference"  # the authors' code
        divisor = abs(delta + self.epsilon) if by_reference else abs(delta) + self.epsilon
        pi = wanted / divisor  # (19)
        if math.isnan(pi) or pi <= 0:
            pi = F(0)
        if pi > self.pi_max:
            pi = self.pi_max
        self.theta[i] = theta + pi * delta
        worker.moment[i] = m
        facts.pi.append(pi if delta else F("nan"))
        facts.proxy_energy += 0.5 * (float(self.kappa) * float(m)) ** 2  # (15)
        facts.central_energy += 0.5 * (float(self.theta[i]) - float(s)) ** 2  # (16)

    def _hand_over(self, worker: Worker, before: Floats) -> None:
        """Sets the θ that the worker gets, and its snapshot."""
        if self.rule != "gem" or self.convention == "after":
            worker.snapshot = worker.answer = list(self.theta)
            worker.base_version = self.version
        elif self.convention == "paper":
            worker.snapshot = worker.answer = before
            worker.base_version = self.version - 1
        else:
            worker.snapshot, worker.answer = before, list(self.theta)
            worker.base_version = self.version


def bin_of(pi: float, pi_max: float) -> int:
    """The bin of π, 16 to an octave and linear inside it; 0 and π_max have one each, and bin 1 takes all below the rest."""
    if pi == 0:
        return 0
    if pi == F(pi_max):
        return BINS - 1
    return max(1, _place(pi) - _place(float(F(pi_max))) + BINS - 2)


def histogram(pi: Floats, pi_max: float) -> np.ndarray:
    """int64, shape (BINS,)."""
    counts = np.zeros(BINS, np.int64)
    for value in with_pi(pi):
        counts[bin_of(float(value), pi_max)] += 1
    return counts


def counted(size: int) -> list[int]:
    """The elements of a tensor of `size` that enter the histogram of π, as decision 0009 states it."""
    stride = 1
    while stride < 64 and size >= 2 * stride * 1024:
        stride *= 2
    return [at for at in range(size) if at % 2048 // 8 % stride == at // 2048 * 19 % stride]


def lower_median(pi: Floats) -> float:
    """The median: the middle element, or the lower of the two."""
    values = sorted(with_pi(pi))
    return float(values[(len(values) - 1) // 2]) if values else 0.0


def with_pi(pi: Floats) -> Floats:
    """Without the elements whose Δ is 0."""
    return [value for value in pi if not math.isnan(value)]


def _place(value: float) -> int:
    mantissa, exponent = math.frexp(value)  # value = mantissa · 2^exponent, mantissa in [½, 1)
    return BINS_PER_OCTAVE * exponent + math.ceil((2 * mantissa - 1) * BINS_PER_OCTAVE) - 1  # closed above
