"""A small task, which other tasks of the tests are made from. Processes that `kit.process` starts can import it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gem_worker.tasks.digits import Digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES = 64


class Line:
    """Learns y = 2x − 1."""

    def __init__(self, data: Path | None = None) -> None:
        self.data = data
        self.inputs = torch.linspace(-1, 1, SAMPLES)[:, None]

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def training_data(self) -> TensorDataset:
        return TensorDataset(self.inputs, 2 * self.inputs - 1)

    def test_data(self) -> TensorDataset:
        return self.training_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def correct(self, model: nn.Module, batch: Any) -> int | Tensor | None:
        return None


class LinearDigits(Digits):
    """The digits for a linear model, which takes a tenth of the network's time to learn them."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10), nn.LogSoftmax(dim=1))
