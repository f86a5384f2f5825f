"""This server's rule, and its candidates: commits one by one, in the order of a clock's events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from gem_api.layout import Vector
from numba import njit

from benchmarks.finals.clock import SIZES, Event

F = np.float32
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01  # PyTorch's AdamW
WARMUP = 0.02  # of the schedule
MOST = 4  # of n for each worker
Gradient = Callable[[Vector, int, int, int], Vector]  # arguments: θ, the worker, its step, samples


def cosine(done: float, total: float) -> float:
    """The schedule's factor: a linear warm-up, then a cosine to 0."""
    warm = WARMUP * total
    if done < warm:
        return (done + 1) / (warm + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warm) / (total - warm))))


def constant(done: float, total: float) -> float:
    return 1.0


@njit(error_model="numpy", cache=True)
def _commit(theta, s, g, m, v, last, b1, left1, b2, left2, c1, c2, n, eta, decay, room, weight, bound, whole):  # type: ignore[no-untyped-def]
    for i in range(theta.size):
        m[i] = b1 * m[i] + left1 * g[i]
        v[i] = b2 * v[i] + left2 * weight * g[i] * g[i]
        mean, square = m[i] * c1, v[i] * c2
        delta = -eta * (mean / (math.sqrt(square + (n - 1) * mean * mean) + EPSILON) + decay * theta[i])
        pi = 1.0
        if bound:
            against = abs(delta) if whole else abs(delta) * weight
            pi = room - abs(theta[i] - s[i]) / against if against > 0 else 0.0
            pi = min(max(pi, 0.0), 1.0)
        step = pi * delta
        last[i] = step  # of a whole batch
        theta[i] += weight * step


@dataclass
class Rule:
    """The rule `gem` around AdamW, with shares of a batch and held replies. A commit of b of B samples has the weight ω = b/B.

    Args:
        rate: η.
        kappa: κ.
        growth: How slowly κ' grows from 1 to κ·√n; 0: it begins there.
        reach: ρ, after a reply that was not held; `reach_held` after one that was.
        bound: Whether there is π.
        whole: Whether π compares with the step of a whole batch, not with that of the share.
        schedule: "cosine" or "constant".
        memory: h = 1 + (n − 1)·`memory`: of how many rounds the moments are, in those of the optimizer.
    """

    rate: float
    kappa: float = 1.5
    growth: float = 0.0
    reach: float = 1.5
    reach_held: float = 1.0
    bound: bool = True
    whole: bool = True
    schedule: str = "cosine"
    memory: float = 0.5
    commit = staticmethod(_commit)

    def begin(self, theta: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """A copy of θ; zeros for m, v and the last step."""
        return theta.copy(), np.zeros_like(theta), np.zeros_like(theta), np.zeros_like(theta)

    def train(
        self, theta: Vector, events: Iterable[Event], workers: int, gradient: Gradient, look: Callable[[float, Vector], bool]
    ) -> Vector:
        """Trains from θ, and returns the last θ. Before each commit it calls `look` with the time and θ; True ends the run."""
        events = list(events)
        total = sum(event.size for event in events) / SIZES
        factor = cosine if self.schedule == "cosine" else constant
        theta, m, v, last = self.begin(theta)
        points: dict[int, Vector] = {}
        computing: set[int] = set()
        bases, own, stale = [0.0] * workers, [0.0] * workers, [0.0] * workers  # in weights
        done, age, left1, left2 = 0.0, 0.0, 1.0, 1.0
        for event in events:
            worker = event.worker
            if not event.size:
                if worker in computing:  # the worker was killed, and joins again
                    stale[worker], own[worker] = 0.0, done
                computing.add(worker)
                known = age / (age + 1)
                reach = self.reach_held if event.held else self.reach
                points[worker] = theta + last * float(F(reach * stale[worker] * known))
                bases[worker] = done
                continue
            if look(event.time, theta):
                return theta
            computing.discard(worker)
            weight = event.size / SIZES
            g = gradient(points[worker], worker, event.step, event.size)
            stale[worker] = min(done - bases[worker], MOST * workers - 1.0)
            n = max(1.0, min(done - own[worker] + weight, MOST * workers))
            h = 1 + (n - 1) * self.memory
            b1, b2 = BETA1 ** (weight / h), BETA2 ** (weight / h)
            left1, left2, age = left1 * b1, left2 * b2, age + weight / h
            eta = self.rate * factor(done, total)
            full = self.kappa * math.sqrt(n)
            room = 1 + (full - 1) * age / (age + self.growth) if self.growth else full
            betas = F(b1), F(1 - b1), F(b2), F(1 - b2), F(1 / (1 - left1)), F(1 / (1 - left2))
            numbers = F(n), F(eta), F(DECAY), F(room), F(weight), self.bound, self.whole
            self.commit(theta, points[worker], g, m, v, last, *betas, *numbers)
            done += weight
            own[worker] = done
        return theta
