"""Asynchronous rules that are this server's neighbours, around AdamW: none at all, DANA (Hakimi et al. 2019, arXiv
1907.11612), and with it Gap-Aware (Barkai et al. 2019, arXiv 1909.10802). Every gradient is a whole batch, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from gem_api.layout import Vector

from benchmarks.finals.apart import BETA1, Gradient, cosine
from benchmarks.finals.clock import Event
from benchmarks.finals.together import Adam

F = np.float32
MEMORY = 0.999  # of the mean length of a step


@dataclass
class Dana:
    """Each worker has an AdamW of its own. Its reply is θ plus β₁ times the sum of all workers' last steps: where their momenta
    lead, as they are now.

    Args:
        rate: η.
        gap: Whether each number of a gradient is divided by its gap, 1 + |θ − s|/C with C the mean length of a step.
    """

    rate: float
    gap: bool = False

    def train(
        self, theta: Vector, events: Iterable[Event], workers: int, gradient: Gradient, look: Callable[[float, Vector], bool]
    ) -> Vector:
        """Trains from θ, and returns the last θ. Before each commit it calls `look` with the time and θ; True ends the run."""
        events = list(events)
        commits = sum(event.size > 0 for event in events)
        theta, done = theta.copy(), 0
        points: dict[int, Vector] = {}
        adams: dict[int, Adam] = {}
        steps: dict[int, Vector] = {}
        ahead, length = np.zeros_like(theta), np.zeros_like(theta)
        for event in events:
            worker = event.worker
            if not event.size:
                points[worker] = theta + F(BETA1) * ahead
                continue
            if look(event.time, theta):
                break
            given = gradient(points[worker], worker, event.step, event.size)
            if self.gap and done:
                mean = length / F(1 - MEMORY**done) + F(1e-12)
                given = given / (1 + np.abs(theta - points[worker]) / mean)
            if worker not in adams:
                adams[worker] = Adam(theta.size)
            step = -F(self.rate * cosine(done, commits)) * adams[worker].direction(given, theta)
            ahead += step - steps.get(worker, F(0))
            length = F(MEMORY) * length + F(1 - MEMORY) * np.abs(step)
            steps[worker], theta, done = step, theta + step, done + 1
        return theta


@dataclass
class Plain:
    """One AdamW for all workers, which applies each gradient as it comes. The reply is θ as it is.

    Args:
        rate: η.
    """

    rate: float

    def train(
        self, theta: Vector, events: Iterable[Event], workers: int, gradient: Gradient, look: Callable[[float, Vector], bool]
    ) -> Vector:
        """As `Dana.train`."""
        events = list(events)
        commits = sum(event.size > 0 for event in events)
        theta, done, adam = theta.copy(), 0, Adam(theta.size)
        points: dict[int, Vector] = {}
        for event in events:
            if not event.size:
                points[event.worker] = theta
                continue
            if look(event.time, theta):
                break
            given = gradient(points[event.worker], event.worker, event.step, event.size)
            theta, done = theta - F(self.rate * cosine(done, commits)) * adam.direction(given, theta), done + 1
        return theta
