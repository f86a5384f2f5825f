"""Helpers for the tests of the PyTorch optimizer: a small network, its data, and a session that trains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gem_client import Session, connect
from gem_client.torch import Optimizer
from kit.model import Array
from kit.server import Live
from torch import Tensor, nn


@contextmanager
def training(
    live: Live, model: nn.Module, *, batches_per_step: int = 1, **settings: Any
) -> Iterator[tuple[Optimizer, Session]]:
    """An optimizer for the model's named parameters, in the run of `live`; `settings` are the connection's."""
    with connect(live.address, **settings) as session:
        optimizer = Optimizer(model.named_parameters(), session, batches_per_step=batches_per_step)
        yield optimizer, session


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss on a new batch for each step: 16 samples of 4 numbers, whose sum the network learns."""
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **told: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step(**told)


def flat(model: nn.Module) -> Array:
    """The model's trained parameters, packed as in θ."""
    return flat_tensors(parameter for parameter in model.parameters() if parameter.requires_grad)


def flat_tensors(tensors: Iterable[Tensor]) -> Array:
    """Tensors one after the other, float32, as θ holds them."""
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors]).numpy()
