"""The rivals: rounds in which workers wait for each other, as an expert would set them up for a kind of cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gem_api.layout import Vector

from benchmarks.finals.apart import BETA1, BETA2, DECAY, EPSILON, Gradient, constant, cosine
from benchmarks.finals.clock import OVERHEAD, SIZES
from benchmarks.versus.profiles import Profile

F = np.float32
Look = Callable[[float, Vector], bool]


class Round(NamedTuple):
    """A round: when it is over, and the gradients in it."""

    time: float
    parts: list[tuple[int, int, int]]  # worker, step, samples


@dataclass(frozen=True)
class Team:
    """Who takes part in a round, and how.

    Attributes:
        kind: "all"; "fast", without those that are always slow; "proportion", with batches in proportion to speed; "alone", one
            worker.
        first: How many of a round's gradients are used, the others being backups; 0: all.
        steps: Local steps in a round.
    """

    kind: str = "all"
    first: int = 0
    steps: int = 1


def sizes(team: Team, profile: Profile, workers: int) -> list[int]:
    """The samples of each worker's batch; 0: it takes no part."""
    far = workers - profile.far
    slow = [profile.factor(worker, workers) + (OVERHEAD if worker >= far else 0.0) for worker in range(workers)]
    if team.kind == "proportion":
        return [max(1, round(SIZES * min(slow) / each)) for each in slow]
    if team.kind == "alone":
        return [SIZES, *[0] * (workers - 1)]
    return [SIZES if team.kind != "fast" or each == min(slow) else 0 for each in slow]


def rounds(team: Team, profile: Profile, workers: int, seed: int, limit: float) -> list[Round]:
    """All rounds until the limit. A killed worker takes no part in rounds until it is back; the others lose nothing."""
    found: list[Round] = []
    samples = sizes(team, profile, workers)
    members = [worker for worker in range(workers) if samples[worker]]
    times = [profile.times(seed, worker, workers) for worker in range(workers)]
    step, now = 0, 0.0
    while True:
        took: list[tuple[float, int]] = []
        for worker in members:
            if _away(profile, worker, workers, now):
                continue
            own = [times[worker](step + each) * samples[worker] / SIZES for each in range(team.steps)]
            far = OVERHEAD if worker >= workers - profile.far else 0.0
            took.append((sum(own) + far, worker))
        took.sort()
        used = took[: team.first or len(took)]
        now += used[-1][0]
        if now > limit:
            return found
        found.append(Round(now, [(worker, step, samples[worker]) for _, worker in sorted(used, key=lambda one: one[1])]))
        step += team.steps


def _away(profile: Profile, worker: int, workers: int, now: float) -> bool:
    if not profile.killed_every or workers < 2:
        return False
    kills, number = profile.kills(workers), 0
    while kills(number)[0] <= now:
        at, victim = kills(number)
        if victim == worker and at <= now < at + profile.away:
            return True
        number += 1
    return False


class Adam:
    """The moments of PyTorch's AdamW, with β₁ and β₂ to the power of 1 / `memory`."""

    def __init__(self, size: int, memory: float = 1.0) -> None:
        self._beta1, self._beta2 = BETA1 ** (1 / memory), BETA2 ** (1 / memory)
        self._first, self._second = np.zeros(size, F), np.zeros(size, F)
        self._left1, self._left2 = 1.0, 1.0  # what is left of the zeros that the moments began with

    def direction(self, gradient: Vector, theta: Vector) -> Vector:
        """Takes a gradient in. Returns the direction of the step from θ."""
        beta1, beta2 = self._beta1, self._beta2
        self._first = F(beta1) * self._first + F(1 - beta1) * gradient
        self._second = F(beta2) * self._second + F(1 - beta2) * gradient * gradient
        self._left1, self._left2 = self._left1 * beta1, self._left2 * beta2
        mean, square = self._first / F(1 - self._left1), self._second / F(1 - self._left2)
        return np.asarray(mean / (np.sqrt(square) + F(EPSILON)) + F(DECAY) * theta, F)


@dataclass
class Synchronous:
    """AdamW with the mean gradient of a round, weighted by samples; its moments' memory is `memory` times as long as usual."""

    rate: float
    schedule: str = "cosine"
    memory: float = 1.0

    def train(
        self, theta: Vector, all_rounds: list[Round], joint: Callable[[Vector, list[tuple[int, int, int]]], Vector], look: Look
    ) -> Vector:
        adam, theta = Adam(theta.size, self.memory), theta.copy()
        factor = cosine if self.schedule == "cosine" else constant
        for number, one in enumerate(all_rounds):
            if look(one.time, theta):
                break
            gradient = joint(theta, one.parts)
            theta = theta - F(self.rate * factor(number, len(all_rounds))) * adam.direction(gradient, theta)
        return theta


@dataclass
class LocalSteps:
    """Local SGD and DiLoCo: each worker steps with an AdamW of its own; their mean movement is a step of Nesterov's momentum.

    Args:
        rate: Of the workers' AdamW.
        steps: Local steps in a round.
        outer: The outer rate; 1 with momentum 0 is the mean of the workers' parameters (local SGD).
        momentum: The outer momentum.
    """

    rate: float
    steps: int
    outer: float = 1.0
    momentum: float = 0.0

    def train(self, theta: Vector, all_rounds: list[Round], gradient: Gradient, look: Look) -> Vector:
        adams: dict[int, Adam] = {}
        theta, speed = theta.copy(), np.zeros_like(theta)
        for number, one in enumerate(all_rounds):
            if look(one.time, theta):
                break
            total = np.zeros_like(theta)
            for worker, step, size in one.parts:
                adam, x = adams.setdefault(worker, Adam(theta.size)), theta.copy()
                for each in range(self.steps):
                    eta = F(self.rate * cosine(number * self.steps + each, len(all_rounds) * self.steps))
                    x = x - eta * adam.direction(gradient(x, worker, step + each, size), x)
                total += x - theta
            mean = total / F(len(one.parts))
            speed = F(self.momentum) * speed + mean
            theta = theta + F(self.outer) * (mean + F(self.momentum) * speed if self.momentum else mean)
        return theta
