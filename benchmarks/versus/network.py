"""What simulated trainings share: a model as one vector, and AdamW's moments. NumPy, float32."""

from __future__ import annotations

import numpy as np
import torch
from gem_api.layout import Vector
from torch import Tensor

from benchmarks.versus.models import Problem

DIVERGED = 50.0  # a held-out loss that no run comes back from
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, np.float32(1e-8), 0.01  # PyTorch's AdamW
F = np.float32


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
