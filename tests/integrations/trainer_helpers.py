"""What the tests of the trainers share: data that counts how often it is used, and what a server knows of a run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import torch
from client.share_helpers import Asking
from gem_api.hyperparameters import Hyperparameters
from kit.server import Live
from torch import Tensor, nn

SAMPLES, SHARD, BATCH = 96, 32, 8
RUN = Hyperparameters(epochs=2, shard_size=SHARD, batch_size=BATCH)
CUT = Hyperparameters(epochs=2, shard_size=SHARD, batch_size=BATCH, smallest_share=1 / 16)
PLAIN = Hyperparameters(rule="downpour", learning_rate=0.1, epochs=2, shard_size=SHARD, batch_size=BATCH)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Sums(torch.utils.data.Dataset[Any]):
    """Four numbers and their sum. Notes which samples were read, in their order, and how often."""

    def __init__(self, as_dict: bool = False) -> None:
        self.inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.read: Counter[int] = Counter()
        self.order: list[int] = []
        self._as_dict = as_dict

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        self.order.append(index)
        inputs, target = self.inputs[index], self.inputs[index].sum(0, keepdim=True)
        return {"inputs": inputs, "labels": target, "unused": index} if self._as_dict else (inputs, target)

    def loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            return nn.functional.mse_loss(model(self.inputs), self.inputs.sum(1, keepdim=True)).item()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def completed(live: Live) -> int:
    """Distinct samples that were trained on, over all epochs."""
    return int(live.on_loop(lambda: live.core.ledger.samples_completed))


def assert_trained_once_an_epoch(live: Live, data: Sums) -> None:
    """Every sample of both epochs was trained on, and read no more often."""
    assert completed(live) == 2 * SAMPLES
    assert set(data.read.values()) == {2}


def assert_follows(asking: Asking) -> None:
    """A worker with two batches in a step has told the server the share of each step, once it was asked for half of it."""
    assert asking.told[0] == 1
    assert set(asking.told[2:]) <= {0.5, 0.25}  # the last step of a pass may have one batch
    assert sum(asking.told) * 2 * BATCH == 2 * SAMPLES


def theta(live: Live) -> Tensor:
    return torch.from_numpy(live.on_loop(lambda: live.core.central.theta.copy()))


def reported_loss(live: Live) -> float:
    """The loss of the last commit of the run's only worker."""
    return float(live.on_loop(lambda: next(iter(live.core.leases.live.values())).last_applied.loss))


def broken(step: int) -> None:
    if step == 2:
        raise ZeroDivisionError("the loss is broken")


def interrupted(step: int) -> None:
    if step == 2:
        os.kill(os.getpid(), signal.SIGINT)
