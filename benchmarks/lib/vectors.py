"""A model as one vector: what simulated workers train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gem_api.layout import Layout, Vector
from torch import Tensor, nn


class VectorModel:
    """A model with all its parameters in one vector, and all gradients in another."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module.train()
        parameters = list(module.named_parameters())
        self.layout = Layout.of([(name, tuple(each.shape)) for name, each in parameters])
        self._theta, self._gradient = torch.zeros(self.layout.parameters), torch.zeros(self.layout.parameters)
        begin = 0
        for _, each in parameters:
            part = slice(begin, begin := begin + each.numel())
            self._theta[part] = each.detach().flatten()
            each.data, each.grad = self._theta[part].view(each.shape), self._gradient[part].view(each.shape)

    @property
    def theta(self) -> Vector:
        """A copy of the parameters: float32, shape (P,)."""
        return self._theta.numpy().copy()

    def at(self, theta: Vector) -> nn.Module:
        """The module, with these parameters until the next call."""
        self._theta.copy_(torch.from_numpy(theta))
        return self._module

    def gradient_of(self, theta: Vector, loss: Callable[[nn.Module], Tensor]) -> tuple[Vector, float]:
        """The gradient at θ, float32, shape (P,), valid until the next call, and the loss."""
        self._gradient.zero_()
        found = loss(self.at(theta))
        found.backward()
        return self._gradient.numpy(), found.item()
