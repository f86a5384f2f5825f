"""A second implementation of all update rules and GEM's proxies, from the papers' equations.

Nothing here calls gem_server's rules. What lasts from commit to commit is float32, as it is on the server; what is computed on
the way is double precision, so an order of operations that a rule is free to choose shows in the last bits alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F = np.float32
Values = npt.NDArray[np.float64]
Rate = Callable[[int], float]  # η_t by version


def kept(values: Any) -> Values:
    """The values as the server keeps them."""
    return np.asarray(values, F).astype(float)


@dataclass
class Worker:
    """The state of one worker: s, the θ that it received; the version of s; and the rule's values, by name, initially 0. Arrays
    are replaced, never changed."""

    kept: dict[str, Values]
    snapshot: Values
    answer: Values
    base_version: int = 0
    base_moves: int = 0
    commits: int = 0


class Oracle:
    """A parameter server reduced to its arithmetic: a rule's `step` returns θ after one commit.

    Args:
        theta: The first value of the central variable.
        workers: Their names.
        rate: η_t.
    """

    def __init__(self, theta: Any, workers: list[str], rate: Rate) -> None:
        self.theta = kept(theta)
        self.rate = rate
        self.version = 0
        self.moves = 0  # how often θ has changed
        self.state: dict[str, Values] = defaultdict(self.zeros)  # what the rule keeps for all workers
        self.workers = {name: Worker(defaultdict(self.zeros), self.theta, self.theta) for name in workers}

    def zeros(self) -> Values:
        return np.zeros_like(self.theta)

    def pull(self, name: str) -> None:
        worker = self.workers[name]
        worker.snapshot = worker.answer = self.theta
        worker.base_version, worker.base_moves = self.version, self.moves

    def commit(self, name: str, update: Any) -> bool:
        """Whether the commit was applied."""
        worker = self.workers[name]
        staleness = self.version - worker.base_version
        taken = self.takes(staleness)
        if taken:
            self.theta = kept(self.step(worker, kept(update), staleness))
            self.version += 1
        self.hand_over(name)
        worker.commits += 1
        return taken

    def takes(self, staleness: int) -> bool:
        return True

    def step(self, worker: Worker, update: Values, staleness: int) -> Any:
        raise NotImplementedError

    def hand_over(self, name: str) -> None:
        """After its commit a worker continues from the new θ."""
        self.pull(name)


class Descent(Oracle):
    """θ ← θ − η_t·g: Accumulated Gradient Normalization, whose workers average (1710.02368). In float32 throughout."""

    def step(self, worker: Worker, update: Values, staleness: int) -> Any:
        return self.theta.astype(F) - F(self.rate(self.version)) * update.astype(F)


class Threshold(Descent):
    """Ringmaster ASGD, Algorithm 4 (2501.16168): a gradient whose delay has reached R is discarded."""

    threshold = 2

    def takes(self, staleness: int) -> bool:
        return staleness < self.threshold


class Elastic(Oracle):
    """Asynchronous EASGD, Algorithm 1 (1412.6651): e = α(x − x̃), x ← x − e, x̃ ← x̃ + e, both with the old x and x̃."""

    alpha = 0.1

    def step(self, worker: Worker, update: Values, staleness: int) -> Values:
        x = worker.snapshot + update
        pull = self.alpha * (x - self.theta)
        worker.snapshot = kept(x - pull)
        return self.theta + pull

    def hand_over(self, name: str) -> None:
        worker = self.workers[name]
        worker.answer, worker.base_version = worker.snapshot, self.version


class Compensated(Oracle):
    """DC-ASGD (1609.08326): w ← w − η(g + λ_t·g⊙g⊙(w − w_bak)), λ_t = λ, or λ/√(MeanSquare + 1e-7) with a decay m."""

    compensation = 0.04
    decay = 0.0

    def step(self, worker: Worker, update: Values, staleness: int) -> Any:
        strength: Any = self.compensation
        if self.decay:
            self.state["square"] = kept(self.decay * self.state["square"] + (1 - self.decay) * update**2)
            strength = strength / np.sqrt(self.state["square"] + 1e-7)
        return self.theta - self.rate(self.version) * (update + strength * update**2 * (self.theta - worker.snapshot))


class Mixed(Oracle):
    """FedAsync (1903.03934): x ← (1 − α_τ)x + α_τ·x_new, α_τ = α·s(τ), x_new being the worker's own parameters."""

    mixing = 0.6
    function: Callable[[int], float] = staticmethod(lambda late: 1.0)

    def step(self, worker: Worker, update: Values, staleness: int) -> Values:
        share = self.mixing * self.function(staleness)
        return (1 - share) * self.theta + share * (worker.snapshot + update)


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

    def step(self, worker: Worker, update: Values, staleness: int) -> Values:
        self.state["sum"] = self.state["sum"] + update / math.sqrt(1 + self.moves - worker.base_moves)
        if (self.version + 1) % self.size:
            return self.theta
        self.moves += 1
        return self.theta + self.outer_rate * self.state.pop("sum") / self.size


class DelayedNesterov(Oracle):
    """Delayed Nesterov, Algorithm 3 of 2401.09135, over the gradients g = −δ; with N = 1 Nesterov's momentum on every one, as
    DiLoCo has it (2311.08105)."""

    step_size = 0.7
    beta = 0.9
    every = 1
    eager = 0.0

    def step(self, worker: Worker, update: Values, staleness: int) -> Values:
        gradient, n, share = -update, self.every, self.eager
        self.state["sum"] = self.state["sum"] + gradient
        if (self.version + 1) % n == 0:
            self.state["m"] = kept(self.beta * self.state["m"] + self.state.pop("sum") / n)
            share = 1 - self.eager * n + self.eager
        return self.theta - self.step_size * (share * self.beta * self.state["m"] + gradient / n)


class EqualSay(Oracle):
    """Rescaled ASGD (2605.13434): γ_i in proportion to worker i's time for a gradient, with mean γ over a cycle. The time is
    τ + 1 commits, and a cycle n."""

    def step(self, worker: Worker, update: Values, staleness: int) -> Values:
        return self.theta - self.rate(self.version) * (staleness + 1) / len(self.workers) * update


class AlongAllMomenta(Oracle):
    """DANA-Zero, Algorithm 4 (1907.11612): v_i ← γ·v_i + g, θ ← θ − η·v_i, and a worker gets θ̂ = θ − η·γ·Σ_j v_j. What the
    server calls θ is θ̂. At another η than before, θ̂ stays where it is."""

    mu = 0.9

    def step(self, worker: Worker, update: Values, staleness: int) -> Any:
        eta = self.rate(self.version)
        inner = self.theta + eta * self.mu * self._all_momenta()  # the paper's θ
        worker.kept["v"] = kept(self.mu * worker.kept["v"] + update)
        return inner - eta * worker.kept["v"] - eta * self.mu * self._all_momenta()

    def _all_momenta(self) -> Any:
        return sum(each.kept["v"] for each in self.workers.values())


class Matched(Oracle):
    """GEM (1805.08469) with some proxy: π = clip((κ|d| − |θ − s|)/(|Δ| + ε), 0, π_max) (19, 27); d is the displacement that
    the proxy would make."""

    mu = 0.9
    kappa = 1.5
    pi_max = 5.0
    convention = "after"

    def step(self, worker: Worker, update: Values, staleness: int) -> Values:
        eta, self.before = self.rate(self.version), self.theta
        wished, delta = self.displacement(worker, update, eta, staleness), -eta * update
        pi = (self.kappa * abs(wished) - abs(self.theta - worker.snapshot)) / (abs(delta) + 1e-16)
        return self.theta + np.clip(pi, 0.0, self.pi_max) * delta

    def hand_over(self, name: str) -> None:
        self.pull(name)
        worker = self.workers[name]
        if self.convention == "paper":
            worker.snapshot, worker.answer, worker.base_version = self.before, self.before, self.version - 1

    def displacement(self, worker: Worker, update: Values, eta: float, staleness: int) -> Values:
        raise NotImplementedError

    def moment(self, state: dict[str, Values], update: Values, eta: float, mu: float) -> Values:
        """m ← μ·m + g, and the step is −η·m: (24), with the rate of now for all gradients."""
        state["m"] = kept(mu * state["m"] + update)
        return -eta * state["m"]


class MomentumMatched(Matched):
    """Momentum SGD as the paper has it (24)."""

    def displacement(self, worker: Worker, update: Values, eta: float, staleness: int) -> Values:
        return self.moment(worker.kept, update, eta, self.mu)


class NesterovMatched(Matched):
    """Nesterov's momentum as a step of the parameters: v ← μ·v − η·g, and they move by μ·v − η·g."""

    def displacement(self, worker: Worker, update: Values, eta: float, staleness: int) -> Values:
        return self.mu * self.moment(worker.kept, update, eta, self.mu) - eta * update


class AdamMatched(Matched):
    """Adam (1412.6980, Algorithm 1), counting each worker's own commits. Its step is the learning rate, or `size`."""

    size = 0.0

    def displacement(self, worker: Worker, update: Values, eta: float, staleness: int) -> Values:
        k, mine = worker.commits + 1, worker.kept
        mine["m"] = kept(self.mu * mine["m"] + (1 - self.mu) * update)
        mine["v"] = kept(0.999 * mine["v"] + 0.001 * update**2)
        mean, square = mine["m"] / (1 - self.mu**k), mine["v"] / (1 - 0.999**k)
        return -(self.size or eta) * mean / (np.sqrt(square) + 1e-8)


class GloballyMatched(Matched):
    """Eight moments for all workers. A commit's proxy is μ·m_k − η·g, which becomes m_k once in τ + 1 commits. The top three of
    the low 32 bits of version·2654435761 are k."""

    def __init__(self, theta: Any, workers: list[str], rate: Rate) -> None:
        super().__init__(theta, workers, rate)
        self.since_taken = [0] * 8

    def displacement(self, worker: Worker, update: Values, eta: float, staleness: int) -> Values:
        k = self.version * 2654435761 % 2**32 // 2**29
        wished = self.moment(drawn := {"m": self.state[f"m{k}"]}, update, eta, self.mu)
        self.since_taken = [since + 1 for since in self.since_taken]
        if self.since_taken[k] >= staleness + 1:
            self.state[f"m{k}"], self.since_taken[k] = drawn["m"], 0
        return wished


class LookingAhead(Oracle):
    """GEM around an optimizer (docs/method.md). The optimizer here is a worker's own."""

    kappa, reach = 1.5, 0.5
    n, h, k = 1, 1.0, 0.0

    def step(self, worker: Worker, update: Values, staleness: int) -> Any:
        self.n = min(staleness + 1, 4 * len(self.workers))
        self.h = (self.n + 1) / 2
        self.k += 1 / self.h
        ahead = self.reach * (self.n - 1) * self.k / (self.k + 1)
        delta = self.direction(update)
        missed = abs(self.theta - worker.snapshot)
        share = np.divide(missed, abs(delta), out=self.zeros(), where=delta != 0)
        move = np.clip(self.kappa * math.sqrt(self.n) - share, 0.0, 1.0) * delta
        self.sent = self.theta + move + ahead * move
        return self.theta + move

    def hand_over(self, name: str) -> None:
        self.pull(name)
        worker = self.workers[name]
        worker.snapshot = worker.answer = self.sent

    def direction(self, change: Values) -> Any:
        """Δ."""
        return change / math.sqrt(self.n)


class AdamWLookingAhead(LookingAhead):
    """One AdamW for all, λ = 0.1: a step of the mean of n gradients, shared by n commits."""

    reach = 1.5

    def direction(self, gradient: Values) -> Any:
        beta1, beta2 = 0.9 ** (1 / self.h), 0.999 ** (1 / self.h)
        self.state["m"] = beta1 * self.state["m"] + (1 - beta1) * gradient
        self.state["v"] = beta2 * self.state["v"] + (1 - beta2) * gradient**2
        mean, square = self.state["m"] / (1 - 0.9**self.k), self.state["v"] / (1 - 0.999**self.k)
        of_the_mean = mean**2 + (square - mean**2) / self.n  # the mean square of the mean of n gradients
        step = math.sqrt(self.n) * mean / (np.sqrt(of_the_mean) + 1e-8) / self.n
        return -self.rate(self.version) * (step + 0.1 * self.theta)


class LionLookingAhead(LookingAhead):
    """One Lion for all, λ = 0.1."""

    reach = 1.5

    def direction(self, gradient: Values) -> Any:
        beta1, beta2 = 0.9 ** (1 / self.h), 0.99 ** (1 / self.h)
        mixed = beta1 * self.state["m"] + (1 - beta1) * gradient
        self.state["m"] = beta2 * self.state["m"] + (1 - beta2) * gradient
        return -self.rate(self.version) * (np.sign(mixed) / math.sqrt(self.n) + 0.1 * self.theta)
