"""LoRA (arXiv 2106.09685): a frozen linear layer, and a trained correction of low rank beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Lora(nn.Module):
    """y = W·x + b + (scale/r)·B·A·x. W and b are frozen; A, shape (r, inputs), and B, shape (outputs, r), are trained.

    B begins with zeros, so that the layer begins as the frozen one.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.factor = scale / rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.factor * (x @ self.down.T @ self.up.T)
        return y

    def merged(self) -> nn.Linear:
        """One linear layer that computes the same."""
        with torch.no_grad():
            self.base.weight += self.factor * self.up @ self.down
        return self.base


def with_adapters(model: nn.Sequential, rank: int) -> nn.Sequential:
    """The model with each linear layer replaced by `Lora`, and all else frozen."""
    model.requires_grad_(False)
    return nn.Sequential(*(Lora(layer, rank) if isinstance(layer, nn.Linear) else layer for layer in model))


def merged(model: nn.Sequential) -> nn.Sequential:
    """The model with each `Lora` replaced by one linear layer: as large and as fast as before, with the corrections in it."""
    return nn.Sequential(*(layer.merged() if isinstance(layer, Lora) else layer for layer in model))
