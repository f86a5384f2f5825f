"""What each of the logical workers of one process gets of their common task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gem_worker.tasks import Task


@dataclass(frozen=True)
class Share:
    """A task whose model is one worker's own, while its data is everybody's.

    Attributes:
        task: Its `loss` and `correct` are called from several threads at once.
        own: The worker's model, as first made.
        data: The training set, loaded once.
    """

    task: Task
    own: nn.Module
    data: Dataset[Any]

    def model(self) -> nn.Module:
        return self.own

    def training_data(self) -> Dataset[Any]:
        return self.data

    def test_data(self) -> Dataset[Any]:
        return self.task.test_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.task.loss(model, batch)

    def correct(self, model: nn.Module, batch: Any) -> int | None:
        return self.task.correct(model, batch)


def shares(task: Task, seed: int, count: int) -> list[Share]:
    """One for each worker, the models all with the same first value.

    PyTorch has one random generator for the process. So the models are made here one after another, before any worker
    draws from it; what workers draw later, for dropout, comes from that one generator in whatever order they get to it.
    """
    data = task.training_data()
    return [Share(task, _model(task, seed), data) for _ in range(count)]


def _model(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.model()
