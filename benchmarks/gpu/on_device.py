"""What the study of whole trainings is made of, with vectors on the GPU: float32 tensors of shape (P,)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.finals.apart import DECAY, EPSILON, Rule, cosine
from benchmarks.finals.clock import SIZES
from benchmarks.finals.together import Synchronous
from benchmarks.versus.models import Problem


class DeviceRule(Rule):
    """The rule, in PyTorch's operations."""

    def begin(self, theta: Any) -> Any:
        return theta.clone(), *(torch.zeros_like(theta) for _ in range(3))

    @staticmethod
    def commit(theta: Any, s: Any, g: Any, m: Any, v: Any, last: Any, *numbers: Any) -> None:
        """As the compiled function of `apart`, with the same arguments."""
        b1, left1, b2, left2, c1, c2, n, eta, decay, room, weight, bound, whole = map(float, numbers)
        m.mul_(b1).add_(g, alpha=left1)
        v.mul_(b2).addcmul_(g, g, value=left2 * weight)
        mean = m * c1
        delta = mean / ((v * c2).addcmul_(mean, mean, value=n - 1).sqrt_() + EPSILON)
        delta.add_(theta, alpha=decay).mul_(-eta)
        if bound:
            against = delta.abs() if whole else delta.abs() * weight
            delta *= (room - (theta - s).abs_() / against).nan_to_num_(nan=0.0).clamp_(0, 1)
        last.copy_(delta)
        theta.add_(delta, alpha=weight)


class DeviceRounds(Synchronous):
    """PyTorch's own AdamW on the mean gradient of each round, as DDP has it."""

    def train(self, theta: Any, all_rounds: Any, joint: Any, look: Any) -> Any:
        optimizer = torch.optim.AdamW([theta], lr=self.rate, weight_decay=DECAY, eps=EPSILON)
        for number, one in enumerate(all_rounds):
            if look(one.time, theta):
                break
            theta.grad = joint(theta, one.parts)
            optimizer.param_groups[0]["lr"] = self.rate * cosine(number, len(all_rounds))
            optimizer.step()
        return theta


class DeviceTrainee:
    """The model, with gradients of batches of any size. It has the methods of the study's `Trainee`."""

    def __init__(self, problem: Problem, seed: int, device: str) -> None:
        self._problem, self._seed, self._model = problem, seed, problem.model(seed).to(device)
        self._parameters = list(self._model.parameters())
        self._first = parameters_to_vector(self._parameters).detach().clone()

    @property
    def theta(self) -> Tensor:
        """A copy of the first parameters."""
        return self._first.clone()

    def gradient(self, theta: Tensor, worker: int, step: int, size: int) -> Tensor:
        """At θ, on `size` of SIZES parts of the batch of a worker's step."""
        return self.joint(theta, [(worker, step, size)])

    def joint(self, theta: Tensor, parts: Sequence[tuple[int, int, int]]) -> Tensor:
        """At θ, on the batches of several workers together."""
        vector_to_parameters(theta, self._parameters)
        whole = self._problem.batch_size
        batches = [self._problem.batch(self._seed, worker, step, whole * size // SIZES) for worker, step, size in parts]
        inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        return parameters_to_vector(torch.autograd.grad(self._problem.loss(self._model, (inputs, targets)), self._parameters))

    def score(self, theta: Tensor) -> float:
        """The held-out loss."""
        vector_to_parameters(theta, self._parameters)
        return self._problem.score(self._model)

    def accuracy(self, theta: Tensor) -> None:
        """Is not asked for."""
