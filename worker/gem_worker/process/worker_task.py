"""The task of each worker in a process: its own model, and shared data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gem_worker.tasks import Task


@dataclass(frozen=True)
class WorkerTask:
    """A task for one worker: its own model, and data that all workers of the process share.

    Attributes:
        task: The common task; its `loss` and `correct` are called from several threads at once.
        own_model: The worker's model, with its initial values.
        data: The training set, loaded once.
    """

    task: Task
    own_model: nn.Module
    data: Dataset[Any]

    def model(self) -> nn.Module:
        return self.own_model

    def training_data(self) -> Dataset[Any]:
        return self.data

    def test_data(self) -> Dataset[Any]:
        return self.task.test_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.task.loss(model, batch)

    @property
    def optimizer(self) -> Any:
        """The task's own `optimizer(model)`; None if it has none."""
        return getattr(self.task, "optimizer", None)

    def correct(self, model: nn.Module, batch: Any) -> int | None:
        return self.task.correct(model, batch)


def worker_tasks(task: Task, seed: int, count: int) -> list[WorkerTask]:
    """One task per worker; all models start with the same values.

    PyTorch has one random generator per process, so the models are made here, before any worker draws from it. Later draws,
    for dropout, depend on the order of the workers' steps.
    """
    data = task.training_data()
    return [WorkerTask(task, _model(task, seed), data) for _ in range(count)]


def _model(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.model()
