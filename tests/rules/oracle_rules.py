"""A second implementation of the other update rules and GEM's proxies: slow, one element at a time, from the papers' equations.

Nothing here calls gem_server's rules. What lasts from commit to commit is float32, as it is on the server; what is computed on
the way is double precision, so an order of operations that a rule is free to choose shows in the last bits alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

F = np.float32
Rate = Callable[[int], float]  # η_t by version


@dataclass
class Worker:
    """The state of one worker: s, the θ that it received; the version of s; and the rule's values, by name."""

    snapshot: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    base_version: int = 0
    base_moves: int = 0
    commits: int = 0
    kept: dict[str, list[float]] = field(default_factory=dict)


class Oracle:
    """A parameter server reduced to its arithmetic: a rule's `step` changes `theta` by one commit.

    Args:
        theta: The first value of the central variable.
        workers: Their names.
        rate: η_t.
    """

    def __init__(self, theta: np.ndarray, workers: list[str], rate: Rate) -> None:
        self.theta = [float(F(value)) for value in theta]
        self.rate = rate
        self.version = 0
        self.moves = 0  # how often θ has changed
        self.workers = {name: Worker() for name in workers}
        for name in workers:
            self.pull(name)

    def zeros(self) -> list[float]:
        return [0.0] * len(self.theta)

    def pull(self, name: str) -> None:
        worker = self.workers[name]
        worker.snapshot, worker.answer = list(self.theta), list(self.theta)
        worker.base_version, worker.base_moves = self.version, self.moves

    def commit(self, name: str, update: np.ndarray) -> bool:
        """Whether the commit was applied."""
        worker, values = self.workers[name], [float(value) for value in update]
        staleness = self.version - worker.base_version
        taken = self.takes(staleness)
        if taken:
            self.step(worker, values, staleness)
            self.theta = [float(F(value)) for value in self.theta]
            self.version += 1
        self.hand_over(name)
        worker.commits += 1
        return taken

    def takes(self, staleness: int) -> bool:
        return True

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        raise NotImplementedError

    def hand_over(self, name: str) -> None:
        """After its commit a worker continues from the new θ."""
        self.pull(name)


class Descent(Oracle):
    """θ ← θ − η_t·g: Accumulated Gradient Normalization, whose workers average (1710.02368). In float32 throughout."""

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        eta = F(self.rate(self.version))
        self.theta = [float(F(value) + F(-eta * F(g))) for value, g in zip(self.theta, update, strict=True)]


class Threshold(Descent):
    """Ringmaster ASGD, Algorithm 4 (2501.16168): a gradient whose delay has reached R is discarded."""

    threshold = 2

    def takes(self, staleness: int) -> bool:
        return staleness < self.threshold


class Elastic(Oracle):
    """Asynchronous EASGD, Algorithm 1 (1412.6651): e = α(x − x̃), x ← x − e, x̃ ← x̃ + e, both with the old x and x̃."""

    alpha = 0.1

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        for i, delta in enumerate(update):
            x = worker.snapshot[i] + delta
            pull = self.alpha * (x - self.theta[i])
            worker.snapshot[i] = float(F(x - pull))
            self.theta[i] += pull

    def hand_over(self, name: str) -> None:
        worker = self.workers[name]
        worker.answer, worker.base_version = list(worker.snapshot), self.version


class Compensated(Oracle):
    """DC-ASGD (1609.08326): w ← w − η(g + λ_t·g⊙g⊙(w − w_bak)), λ_t = λ, or λ/√(MeanSquare + 1e-7) with a decay m."""

    compensation = 0.04
    decay = 0.0

    def __init__(self, theta: np.ndarray, workers: list[str], rate: Rate) -> None:
        super().__init__(theta, workers, rate)
        self.mean_square = self.zeros()

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        for i, g in enumerate(update):
            strength = self.compensation
            if self.decay:
                self.mean_square[i] = float(F(self.decay * self.mean_square[i] + (1 - self.decay) * g * g))
                strength /= math.sqrt(self.mean_square[i] + 1e-7)
            self.theta[i] -= self.rate(self.version) * (g + strength * g * g * (self.theta[i] - worker.snapshot[i]))


class Mixed(Oracle):
    """FedAsync (1903.03934): x ← (1 − α_τ)x + α_τ·x_new, α_τ = α·s(τ), x_new being the worker's own parameters."""

    mixing = 0.6
    function: Callable[[int], float] = staticmethod(lambda late: 1.0)

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        share = self.mixing * self.function(staleness)
        for i, delta in enumerate(update):
            self.theta[i] = (1 - share) * self.theta[i] + share * (worker.snapshot[i] + delta)


def polynomial(a: float) -> Callable[[int], float]:
    """s(τ) = (τ + 1)^−a."""
    return staticmethod(lambda late: 1 / (late + 1) ** a)


def hinge(a: float, b: float) -> Callable[[int], float]:
    """s(τ) = 1 up to b, then 1/(a(τ − b) + 1)."""
    return staticmethod(lambda late: 1.0 if late <= b else 1 / (a * (late - b) + 1))


class Buffered(Oracle):
    """FedBuff (2106.06639): once there are K deltas, x ← x + η_g·(1/K)·Σ δ_i/√(1 + τ_i), τ_i in moves of x."""

    size = 4
    outer_rate = 1.0

    def __init__(self, theta: np.ndarray, workers: list[str], rate: Rate) -> None:
        super().__init__(theta, workers, rate)
        self.waiting: list[list[float]] = []

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        weight = 1 / math.sqrt(1 + self.moves - worker.base_moves)
        self.waiting.append([weight * delta for delta in update])
        if len(self.waiting) == self.size:
            for i in range(len(self.theta)):
                self.theta[i] += self.outer_rate * sum(deltas[i] for deltas in self.waiting) / self.size
            self.waiting.clear()
            self.moves += 1


class DelayedNesterov(Oracle):
    """Delayed Nesterov, Algorithm 3 of 2401.09135, over the gradients g = −δ; with N = 1 Nesterov's momentum on every one, as
    DiLoCo has it (2311.08105)."""

    step_size = 0.7
    beta = 0.9
    every = 1
    eager = 0.0

    def __init__(self, theta: np.ndarray, workers: list[str], rate: Rate) -> None:
        super().__init__(theta, workers, rate)
        self.momentum = self.zeros()
        self.window: list[list[float]] = []

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        gradient, n, c = [-delta for delta in update], self.every, self.eager
        self.window.append(gradient)
        full = len(self.window) == n
        for i, g in enumerate(gradient):
            if full:
                self.momentum[i] = float(F(self.beta * self.momentum[i] + sum(each[i] for each in self.window) / n))
            share = 1 - c * n + c if full else c
            self.theta[i] -= self.step_size * (share * self.beta * self.momentum[i] + g / n)
        if full:
            self.window.clear()


class EqualSay(Oracle):
    """Rescaled ASGD (2605.13434): γ_i in proportion to worker i's time for a gradient, with mean γ over a cycle. The time is
    τ + 1 commits, and a cycle n."""

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        eta = self.rate(self.version) * (staleness + 1) / len(self.workers)
        self.theta = [value - eta * g for value, g in zip(self.theta, update, strict=True)]


class AlongAllMomenta(Oracle):
    """DANA-Zero, Algorithm 4 (1907.11612): v_i ← γ·v_i + g, θ ← θ − η·v_i, and a worker gets θ̂ = θ − η·γ·Σ_j v_j. What the
    server calls θ is θ̂. At another η than before, θ̂ stays where it is."""

    mu = 0.9

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        eta = self.rate(self.version)
        for kept in self.workers.values():
            kept.kept.setdefault("v", self.zeros())
        for i, g in enumerate(update):
            others = sum(each.kept["v"][i] for each in self.workers.values())
            inner = self.theta[i] + eta * self.mu * others  # the paper's θ
            before = worker.kept["v"][i]
            worker.kept["v"][i] = float(F(self.mu * before + g))
            inner -= eta * worker.kept["v"][i]
            self.theta[i] = inner - eta * self.mu * (others - before + worker.kept["v"][i])


class Matched(Oracle):
    """GEM (1805.08469) with some proxy: π = clip((κ|d| − |θ − s|)/(|Δ| + ε), 0, π_max) (19, 27); d is the displacement that
    the proxy would make."""

    mu = 0.9
    kappa = 1.5
    pi_max = 5.0
    convention = "after"

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        eta, before = self.rate(self.version), list(self.theta)
        wished = self.displacement(worker, update, eta, staleness)
        for i, g in enumerate(update):
            delta = -eta * g
            pi = (self.kappa * abs(wished[i]) - abs(self.theta[i] - worker.snapshot[i])) / (abs(delta) + 1e-16)
            self.theta[i] += min(max(pi, 0.0), self.pi_max) * delta
        worker.kept["before"] = before

    def hand_over(self, name: str) -> None:
        worker = self.workers[name]
        before = worker.kept["before"]
        self.pull(name)
        if self.convention == "paper":
            worker.snapshot, worker.answer, worker.base_version = before, before, self.version - 1

    def displacement(self, worker: Worker, update: list[float], eta: float, staleness: int) -> list[float]:
        raise NotImplementedError

    def moment(self, kept: dict[str, list[float]], update: list[float], eta: float, mu: float) -> list[float]:
        """m ← μ·m + g, and the step is −η·m: (24), with the rate of now for all gradients."""
        before = kept.get("m", self.zeros())
        kept["m"] = [float(F(mu * m + g)) for m, g in zip(before, update, strict=True)]
        return [-eta * m for m in kept["m"]]


class MomentumMatched(Matched):
    """Momentum SGD as the paper has it (24)."""

    def displacement(self, worker: Worker, update: list[float], eta: float, staleness: int) -> list[float]:
        return self.moment(worker.kept, update, eta, self.mu)


class NesterovMatched(Matched):
    """Nesterov's momentum as a step of the parameters: v ← μ·v − η·g, and they move by μ·v − η·g."""

    def displacement(self, worker: Worker, update: list[float], eta: float, staleness: int) -> list[float]:
        velocity = self.moment(worker.kept, update, eta, self.mu)
        return [self.mu * v - eta * g for v, g in zip(velocity, update, strict=True)]


class AdamMatched(Matched):
    """Adam (1412.6980, Algorithm 1), counting each worker's own commits. Its step is the learning rate, or `size`."""

    size = 0.0

    def displacement(self, worker: Worker, update: list[float], eta: float, staleness: int) -> list[float]:
        k, kept = worker.commits + 1, worker.kept
        first, second = kept.get("m", self.zeros()), kept.get("v", self.zeros())
        kept["m"] = [float(F(self.mu * m + (1 - self.mu) * g)) for m, g in zip(first, update, strict=True)]
        kept["v"] = [float(F(0.999 * v + 0.001 * g * g)) for v, g in zip(second, update, strict=True)]
        hats = [(m / (1 - self.mu**k), v / (1 - 0.999**k)) for m, v in zip(kept["m"], kept["v"], strict=True)]
        step = self.size if self.size else eta
        return [-step * m / (math.sqrt(v) + 1e-8) for m, v in hats]


class GloballyMatched(Matched):
    """Eight moments for all workers. A commit's proxy is μ·m_k − η·g, which becomes m_k once in τ + 1 commits. The top three of
    the low 32 bits of version·2654435761 are k."""

    def __init__(self, theta: np.ndarray, workers: list[str], rate: Rate) -> None:
        super().__init__(theta, workers, rate)
        self.shared = [self.zeros() for _ in range(8)]
        self.since_taken = [0] * 8

    def displacement(self, worker: Worker, update: list[float], eta: float, staleness: int) -> list[float]:
        k = self.version * 2654435761 % 2**32 // 2**29
        wished = self.moment(kept := {"m": list(self.shared[k])}, update, eta, self.mu)
        self.since_taken = [since + 1 for since in self.since_taken]
        if self.since_taken[k] >= staleness + 1:
            self.shared[k], self.since_taken[k] = kept["m"], 0
        return wished


class LookingAhead(Oracle):
    """GEM around an optimizer (docs/method.md). The optimizer here is a worker's own."""

    kappa, reach = 1.5, 0.5

    def __init__(self, theta: np.ndarray, workers: list[str], rate: Rate) -> None:
        super().__init__(theta, workers, rate)
        self.n, self.h, self.k = 1, 1.0, 0.0
        self.first, self.second = self.zeros(), self.zeros()

    def step(self, worker: Worker, update: list[float], staleness: int) -> None:
        self.n = min(staleness + 1, 4 * len(self.workers))
        self.h = (self.n + 1) / 2
        self.k += 1 / self.h
        ahead = self.reach * (self.n - 1) * self.k / (self.k + 1)
        sent = []
        for i, value in enumerate(update):
            delta = self.direction(i, value)
            missed = abs(self.theta[i] - worker.snapshot[i])
            pi = min(max(self.kappa * math.sqrt(self.n) - missed / abs(delta), 0.0), 1.0) if delta else 0.0
            self.theta[i] += pi * delta
            sent.append(self.theta[i] + ahead * pi * delta)
        self.sent = sent

    def hand_over(self, name: str) -> None:
        super().hand_over(name)
        worker = self.workers[name]
        worker.snapshot, worker.answer = list(self.sent), list(self.sent)

    def direction(self, i: int, change: float) -> float:
        """Δ of one element."""
        return change / math.sqrt(self.n)


class AdamWLookingAhead(LookingAhead):
    """One AdamW for all, λ = 0.1: a step of the mean of n gradients, shared by n commits."""

    reach = 1.5

    def direction(self, i: int, gradient: float) -> float:
        beta1, beta2 = 0.9 ** (1 / self.h), 0.999 ** (1 / self.h)
        self.first[i] = beta1 * self.first[i] + (1 - beta1) * gradient
        self.second[i] = beta2 * self.second[i] + (1 - beta2) * gradient**2
        mean, square = self.first[i] / (1 - 0.9**self.k), self.second[i] / (1 - 0.999**self.k)
        of_the_mean = mean**2 + (square - mean**2) / self.n  # the mean square of the mean of n gradients
        step = math.sqrt(self.n) * mean / (math.sqrt(of_the_mean) + 1e-8) / self.n
        return float(-self.rate(self.version) * (step + 0.1 * self.theta[i]))


class LionLookingAhead(LookingAhead):
    """One Lion for all, λ = 0.1."""

    reach = 1.5

    def direction(self, i: int, gradient: float) -> float:
        beta1, beta2 = 0.9 ** (1 / self.h), 0.99 ** (1 / self.h)
        mixed = beta1 * self.first[i] + (1 - beta1) * gradient
        self.first[i] = beta2 * self.first[i] + (1 - beta2) * gradient
        sign = (mixed > 0) - (mixed < 0)
        return float(-self.rate(self.version) * (sign / math.sqrt(self.n) + 0.1 * self.theta[i]))
