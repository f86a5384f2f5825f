"""Trains a problem with simulated workers: real gradients, and a clock that only counts the time that gradients take."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from gem_api.layout import Vector
from torch import Tensor

from benchmarks.versus.models import Problem
from benchmarks.versus.outcome import crossing
from benchmarks.versus.profiles import Profile
from benchmarks.versus.simulated.methods import Asynchronous, Synchronous

SCORED_EVERY = 2.0  # units
DIVERGED = 50.0  # a held-out loss that no run comes back from


class Network:
    """The problem's model, with all parameters and all gradients in one vector each."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem = problem
        self._module = problem.model(seed).train()
        parameters = list(self._module.parameters())
        size = sum(each.numel() for each in parameters)
        self._theta, self._gradient = torch.zeros(size), torch.zeros(size)
        begin = 0
        for each in parameters:
            part = slice(begin, begin := begin + each.numel())
            self._theta[part] = each.detach().flatten()
            each.data, each.grad = self._theta[part].view(each.shape), self._gradient[part].view(each.shape)

    @property
    def theta(self) -> Vector:
        """A copy of the parameters: float32, shape (P,)."""
        return self._theta.numpy().copy()

    def gradient(self, theta: Vector, seed: int, worker: int, step: int) -> Vector:
        """The gradient at θ on the batch of a worker's step: float32, shape (P,), valid until the next call."""
        return self.gradient_on(theta, self._problem.batch(seed, worker, step))

    def gradient_on(self, theta: Vector, batch: tuple[Tensor, Tensor]) -> Vector:
        """The gradient at θ on a batch: float32, shape (P,), valid until the next call."""
        self._theta.copy_(torch.from_numpy(theta))
        self._gradient.zero_()
        self._problem.loss(self._module, batch).backward()
        gradient: Vector = self._gradient.numpy()
        return gradient

    def score(self, theta: Vector) -> float:
        """The held-out loss at θ."""
        self._theta.copy_(torch.from_numpy(theta))
        return self._problem.score(self._module)

    def accuracy(self, theta: Vector) -> float | None:
        """The share of right answers on held-out data at θ; None if the problem has none."""
        self._theta.copy_(torch.from_numpy(theta))
        return self._problem.accuracy(self._module)


@dataclass
class Curve:
    """Held-out losses over time.

    Attributes:
        times: Units since the start.
        losses: The held-out loss then.
        gradients: Gradients used until the end.
    """

    times: list[float] = field(default_factory=lambda: [0.0])
    losses: list[float] = field(default_factory=list)
    gradients: int = 0

    def time_to(self, loss: float) -> float | None:
        """When the loss was reached first, interpolated between two scores; None: never."""
        points = [(time, each, 0, 0) for time, each in zip(self.times, self.losses, strict=True)]
        found = crossing(points, loss)
        return found and found[0]


class Reply(NamedTuple):
    """What a worker was sent: the point that it computes a gradient on, and the version of θ then."""

    point: Vector
    version: int


@dataclass
class Cluster:
    """Simulated workers of a kind of cluster.

    Args:
        problem: What they train.
        profile: How long their gradients take, and which are killed.
        workers: How many.
        seed: Of θ's first value, the batches and the times.
        limit: Units after which a run ends.
        goal: The loss at which it ends earlier.
        overlap: Whether a worker computes its next gradient while its commit is on its way, on the θ of the commit before.
        alter: Changes a gradient before it is sent, given its worker and step; None: not at all.
        begins: When each worker joins.
        accumulated: How many gradients each worker's commit is the mean of.
    """

    problem: Problem
    profile: Profile
    workers: int
    seed: int
    limit: float
    goal: float
    overlap: bool = False
    alter: Callable[[Vector, int, int], Vector] | None = None
    begins: Callable[[int], float] = lambda worker: 0.0
    accumulated: Callable[[int], int] = lambda worker: 1

    def __post_init__(self) -> None:
        self._network = Network(self.problem, self.seed)
        self._times = [self.profile.times(self.seed, worker, self.workers) for worker in range(self.workers)]

    def train_together(self, method: Synchronous) -> Curve:
        """Rounds in which everybody waits for the slowest."""
        curve, now, due, step = Curve(), 0.0, SCORED_EVERY, 0
        theta = self._network.theta
        curve.losses.append(self._network.score(theta))
        method.start(theta)
        while not self._over(curve):
            now += max(times(step) for times in self._times)
            while due < now:  # scored with the θ of before this round
                self._add(curve, due, theta)
                due += SCORED_EVERY
            total = np.zeros_like(theta)
            for worker in range(self.workers):
                total += self._gradient(theta, worker, step)
            theta = method.step(total / np.float32(self.workers))
            curve.gradients += self.workers
            step += 1
        return curve

    def train_apart(self, method: Asynchronous) -> Curve:
        """Commits in the order in which they arrive; nobody waits."""
        curve, due, version, order = Curve(), SCORED_EVERY, 0, self.workers
        theta = self._network.theta
        curve.losses.append(self._network.score(theta))
        method.start(theta)
        events = [(self.begins(worker), worker, worker, 0) for worker in range(self.workers)]  # time, order, worker, life
        lives, steps, replies = [0] * self.workers, [0] * self.workers, dict[int, Reply]()
        flying = dict[int, tuple[Vector, Reply]]()
        kills, killed = self.profile.kills(self.workers), 0
        while not self._over(curve):
            now, _, worker, life = heapq.heappop(events)
            while self.profile.killed_every and kills(killed)[0] <= now:
                at, victim = kills(killed)
                killed, order, lives[victim] = killed + 1, order + 1, lives[victim] + 1
                flying.pop(victim, None)
                heapq.heappush(events, (at + self.profile.away, order, victim, lives[victim]))
            while due <= now:
                self._add(curve, due, method.theta)
                due += SCORED_EVERY
            if life != lives[worker]:
                continue
            if worker in flying:
                gradient, computed_on = flying[worker]
                active = len(flying)
                point = method.commit(worker, gradient, computed_on.point, version - computed_on.version, active)
                version += 1
                curve.gradients += self.accumulated(worker)
                reply = Reply(point, version)
            else:
                reply = replies[worker] = Reply(method.join(worker), version)
            basis = replies[worker] if self.overlap else reply  # with overlap it began before the reply came
            replies[worker] = reply
            count = self.accumulated(worker)
            gradients = [self._gradient(basis.point, worker, steps[worker] + each).copy() for each in range(count)]
            seconds = sum(self._times[worker](steps[worker] + each) for each in range(count))
            flying[worker] = np.asarray(sum(gradients[1:], gradients[0]) / np.float32(count), np.float32), basis
            order += 1
            heapq.heappush(events, (now + seconds, order, worker, life))
            steps[worker] += count
        return curve

    def _gradient(self, theta: Vector, worker: int, step: int) -> Vector:
        gradient = self._network.gradient(theta, self.seed, worker, step)
        return gradient if self.alter is None else self.alter(gradient, worker, step)

    def _add(self, curve: Curve, at: float, theta: Vector) -> None:
        curve.times.append(at)
        curve.losses.append(self._network.score(theta))

    def _over(self, curve: Curve) -> bool:
        last = curve.losses[-1]
        return last <= self.goal or not last < DIVERGED or curve.times[-1] >= self.limit
