"""A small model, its optimizers and its loop, for tests of optimizers that a worker brings."""

from __future__ import annotations

from typing import Any

import torch
from gem_api.hyperparameters import Hyperparameters
from torch import nn

INPUTS = torch.linspace(-1, 1, 24).view(8, 3)
PLAIN = Hyperparameters(epochs=0, steps=10_000, batch_size=4, shard_size=4)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """No decay on biases, and a slower first layer."""
    named = dict(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named.items() if name == "0.weight"], "lr": 0.005, "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named.items() if name == "2.weight"], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01, betas=(0.8, 0.95))


def train(model: nn.Module, optimizer: Any, steps: int, scheduler: Any = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = ((model(INPUTS) - INPUTS.sum(1, keepdim=True) + step / 100) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5)


def simple(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)
