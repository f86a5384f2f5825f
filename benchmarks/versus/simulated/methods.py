"""How commits become a new θ: the candidates, what the literature has, and rounds that everybody waits for. NumPy, float32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from gem_api.layout import Vector

BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, np.float32(1e-8), 0.01  # PyTorch's AdamW
F = np.float32


class Adam:
    """The moments of AdamW, whose memory may be longer: h commits instead of each one."""

    def __init__(self, size: int) -> None:
        self._first, self._second = np.zeros(size, F), np.zeros(size, F)
        self._left1, self._left2 = 1.0, 1.0  # what is left of the zeros that the moments began with

    def take(self, gradient: Vector, h: float = 1.0) -> tuple[Vector, Vector]:
        """Takes a gradient in. Returns the bias-corrected m̂ and v̂."""
        beta1, beta2 = BETA1 ** (1 / h), BETA2 ** (1 / h)
        self._first = F(beta1) * self._first + F(1 - beta1) * gradient
        self._second = F(beta2) * self._second + F(1 - beta2) * gradient * gradient
        self._left1, self._left2 = self._left1 * beta1, self._left2 * beta2
        return self._first / F(1 - self._left1), self._second / F(1 - self._left2)

    def direction(self, gradient: Vector, theta: Vector) -> Vector:
        """Takes a gradient in. Returns the direction of AdamW's step from θ."""
        mean, square = self.take(gradient)
        return np.asarray(mean / (np.sqrt(square) + EPSILON) + F(DECAY) * theta, F)


@dataclass
class Synchronous:
    """Rounds: a step with the mean gradient of all workers.

    Args:
        rate: The learning rate.
        optimizer: "adamw" or "sgd" (with momentum 0.9).
    """

    rate: float
    optimizer: str = "adamw"
    theta: Vector = field(init=False)

    def start(self, theta: Vector) -> None:
        self.theta, self._adam, self._moment = theta, Adam(theta.size), np.zeros_like(theta)

    def step(self, gradient: Vector) -> Vector:
        if self.optimizer == "sgd":
            self._moment = F(0.9) * self._moment + gradient
            self.theta = self.theta - F(self.rate) * self._moment
            return self.theta
        self.theta = self.theta - F(self.rate) * self._adam.direction(gradient, self.theta)
        return self.theta


class Asynchronous:
    """Commits one by one.

    Attributes:
        theta: The central variable.
    """

    theta: Vector

    def start(self, theta: Vector) -> None:
        """Begins a run."""
        self.theta = theta

    def join(self, worker: int) -> Vector:
        """A worker joins. Returns the point of its first gradient."""
        return self.theta

    def commit(self, worker: int, gradient: Vector, point: Vector, staleness: int, workers: int) -> Vector:
        """Takes the gradient that a worker computed on a point. Returns the point of its next one."""
        raise NotImplementedError


def matched(kappa: float, delta: Vector, moved: Vector, against: float = 1.0) -> Vector:
    """π = clip(κ − |moved|/|Δ|, 0, 1), element by element (GEM's Eq. 19 if Δ is its own proxy). What was moved against Δ counts
    `against` times."""
    with np.errstate(divide="ignore", invalid="ignore"):
        pi = F(kappa) - np.abs(moved) / np.abs(delta) * np.where((moved < 0) == (delta < 0), F(1), F(against))
    return np.clip(np.nan_to_num(pi, nan=0.0), F(0), F(1))


@dataclass
class Gem(Asynchronous):
    """GEM around an AdamW that all workers share, as it was before: π = clip(κ − |θ − s|/|Δ|, 0, 1), s = θ."""

    rate: float
    kappa: float = 2.0

    def start(self, theta: Vector) -> None:
        super().start(theta)
        self._adam = Adam(theta.size)

    def commit(self, worker: int, gradient: Vector, point: Vector, staleness: int, workers: int) -> Vector:
        delta = -F(self.rate) * self._adam.direction(gradient, self.theta)
        self.theta = self.theta + matched(self.kappa, delta, self.theta - point) * delta
        return self.theta


@dataclass
class OwnSteps(Asynchronous):
    """GEM around the steps of an AdamW that each worker has for itself.

    Args:
        root: Whether κ is multiplied by √n.
        shrink: Whether steps are divided by √n.
        ahead: ρ of `LookAhead`.
    """

    rate: float
    kappa: float = 2.0
    root: bool = False
    ahead: float = 0.0
    shrink: bool = False

    def start(self, theta: Vector) -> None:
        super().start(theta)
        self._adams: dict[int, Adam] = {}

    def commit(self, worker: int, gradient: Vector, point: Vector, staleness: int, workers: int) -> Vector:
        delta: Vector = -F(self.rate) * self._adams.setdefault(worker, Adam(gradient.size)).direction(gradient, point)
        if self.shrink:
            delta = delta / F(math.sqrt(workers))
        kappa = self.kappa * (math.sqrt(workers) if self.root else 1.0)
        step = matched(kappa, delta, self.theta - point) * delta
        self.theta = self.theta + step
        return self.theta + F(self.ahead * (workers - 1)) * step


@dataclass
class PaperGem(Asynchronous):
    """The paper's rule: each worker has a moment; SGD.

    Args:
        ahead: s = θ + ahead·τ̂·v̄, with the moving mean v̄ of a commit's movement; 0: the paper's own.
    """

    rate: float
    kappa: float = 1.0
    ahead: float = 0.0

    def start(self, theta: Vector) -> None:
        super().start(theta)
        self._moments: dict[int, Vector] = {}
        self._moved = np.zeros_like(theta)

    def commit(self, worker: int, gradient: Vector, point: Vector, staleness: int, workers: int) -> Vector:
        delta = -F(self.rate) * gradient
        moment = self._moments[worker] = F(0.9) * self._moments.get(worker, np.zeros_like(delta)) + delta
        with np.errstate(divide="ignore", invalid="ignore"):
            pi = (F(self.kappa) * np.abs(moment) - np.abs(self.theta - point)) / (np.abs(delta) + F(1e-16))
        step = np.clip(np.nan_to_num(pi, nan=0.0), F(0), F(5)) * delta
        self.theta = self.theta + step
        if not self.ahead:
            return self.theta
        self._moved += F(1 / workers) * (step - self._moved)
        return self.theta + F(self.ahead * (workers - 1)) * self._moved


@dataclass
class LookAhead(Asynchronous):
    """Energy matching against the movement that was not foreseen, with n = τ + 1, at most four for each worker, and
    h = (n + 1)/2:

        m ← β₁'·m + (1 − β₁')·g    v ← β₂'·v + (1 − β₂')·g⊙g     β' = β^(1/h)
        Δ = −η·(m̂/(√(v̂ + (n − 1)·m̂⊙m̂) + ε) + λ·θ)
        π = clip(κ·√n − |θ − s|/|Δ|, 0, 1)
        θ ← θ + π·Δ
        s ← θ + ρ·(n − 1)·k/(k + 1)·π·Δ                          k: the sum of 1/h over all commits

    Args:
        rate: η, that of one worker.
        reach: ρ.
        kappa: κ.
        memory: "h"; "n": β' = β^(1/n); "commits": β' = β.
        split: Whether the mean's part of v̂ counts n times; if not, the rate is divided by √n instead.
        count: n; "leases" for the number of workers, "mean" for a moving mean of the worker's staleness, and 1.
        horizon: In place of n − 1: "mean" (moving mean of the worker's staleness).
        predict: "step" (π·Δ), "raw" (Δ), or "mean" (moving mean of π·Δ over n commits).
        bound: π: "energy", "gap" (1/G of Gap-Aware, for each element), or "none".
        grows: κ grows with √n ("root") or n ("half": κ·n/2), or not ("not").
        against: How often |θ − s| counts if θ has moved less far than s in the direction of Δ.
        gradual: Whether ρ is multiplied by k/(k + 1).
    """

    rate: float
    reach: float = 1.5
    kappa: float = 1.5
    memory: str = "h"
    split: bool = True
    horizon: str = "n"
    predict: str = "step"
    bound: str = "energy"
    grows: str = "root"
    gradual: bool = True
    against: float = 1.0
    count: str = "staleness"

    def start(self, theta: Vector) -> None:
        super().start(theta)
        self._adam, self._mean_staleness, self._age = Adam(theta.size), dict[int, float](), 0.0
        self._moved = np.zeros_like(theta)

    def commit(self, worker: int, gradient: Vector, point: Vector, staleness: int, workers: int) -> Vector:
        mean = self._mean_staleness.get(worker, float(staleness))
        mean = self._mean_staleness[worker] = 0.75 * mean + 0.25 * staleness
        count = {"leases": workers, "staleness": staleness + 1, "mean": mean + 1}[self.count]
        count = min(count, 4 * workers)
        self._age += 2 / (count + 1)
        delta = self._step(gradient, count)
        step = self._pi(delta, self.theta - point, count) * delta
        self.theta = self.theta + step
        self._moved += F(1 / workers) * (step - self._moved)
        ahead = {"step": step, "raw": delta, "mean": self._moved}[self.predict]
        known = self._age / (self._age + 1) if self.gradual else 1.0
        return self.theta + F(known * self.reach * (mean if self.horizon == "mean" else count - 1)) * ahead

    def _step(self, gradient: Vector, workers: float) -> Vector:
        h = {"h": (workers + 1) / 2, "n": workers, "commits": 1.0}[self.memory]
        mean, square = self._adam.take(gradient, h)
        if self.split:
            direction = mean / (np.sqrt(square + F(workers - 1) * mean * mean) + EPSILON)
        else:
            direction = mean / (np.sqrt(square) + EPSILON) / F(math.sqrt(workers))
        return np.asarray(-F(self.rate) * (direction + F(DECAY) * self.theta), F)

    def _pi(self, delta: Vector, moved: Vector, workers: float) -> Vector:
        if self.bound == "energy":
            growth = {"root": math.sqrt(workers), "half": workers / 2, "not": 1.0}[self.grows]
            return matched(self.kappa * growth, delta, moved, self.against)
        if self.bound == "gap":
            with np.errstate(divide="ignore", invalid="ignore"):
                gap = np.nan_to_num(np.abs(moved) / np.abs(delta), nan=0.0)
            return np.asarray(1 / np.maximum(F(1), gap), F)
        return np.ones_like(delta)


@dataclass
class DanaAdamW(Asynchronous):
    """DANA's look-ahead around the AdamW of each worker: a worker gets θ plus the next step of every worker's own AdamW, as
    they are now. No π.

    Args:
        gap: Whether each gradient is divided by 1 + |θ − s|/C, as in Gap-Aware.
    """

    rate: float
    gap: bool = False

    def start(self, theta: Vector) -> None:
        super().start(theta)
        self._adams: dict[int, Adam] = {}
        self._steps: dict[int, Vector] = {}
        self._sum, self._length, self._age = np.zeros_like(theta), np.zeros_like(theta), 0

    def commit(self, worker: int, gradient: Vector, point: Vector, staleness: int, workers: int) -> Vector:
        if self.gap and self._age:
            gradient = np.asarray(
                gradient / (1 + np.abs(self.theta - point) / (self._length / (1 - 0.999**self._age) + 1e-12)), F
            )
        step = -F(self.rate) * self._adams.setdefault(worker, Adam(gradient.size)).direction(gradient, self.theta)
        self._sum += step - self._steps.get(worker, np.zeros_like(step))
        self._steps[worker] = step
        self._length = F(0.999) * self._length + F(0.001) * np.abs(step)
        self._age += 1
        self.theta = self.theta + step
        return self.theta + F(0.9) * self._sum
