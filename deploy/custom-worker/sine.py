"""A task: data, a model and a loss for gem-train, gem-worker and gem-evaluator. Put your own in place of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset


class Sine:
    """Learns the sine function."""

    def __init__(self, data: Path | None) -> None:
        # Your data, from the folder given as --data (None without it): data sets with a length and an index. All workers must
        # read the same samples in the same order, so sort the names of files, and seed what is drawn at random.
        inputs = torch.linspace(-3, 3, 2560).unsqueeze(1)
        samples = TensorDataset(inputs, torch.sin(inputs))
        self.training = Subset(samples, [number for number in range(2560) if number % 5])
        self.held_out = Subset(samples, range(0, 2560, 5))

    def model(self) -> nn.Module:
        # Your model. The one that the first worker makes begins the run.
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_data(self) -> Dataset[Any]:
        return self.training

    def test_data(self) -> Dataset[Any]:
        return self.held_out

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        # Your loss: the mean over a batch, as a DataLoader returns it.
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def correct(self, model: nn.Module, batch: Any) -> int | None:
        # How many samples of the batch the model gets right. None: the task has no accuracy.
        return None

    # Your optimizer is a setting of the run, such as --optimizer adamw. For any other one of PyTorch's, add a method
    # optimizer(self, model) that returns it: each worker then makes its steps.
