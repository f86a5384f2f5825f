"""A task that brings its own optimizer: used if the run asks for it, and named if it is not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.trainer import train
from gem_worker.tasks import Task, TaskError
from kit.server import config, serving
from kit.task import Line
from prometheus_client.registry import CollectorRegistry
from torch import nn

OWN = Hyperparameters(optimizer="worker", rule="downpour", batch_size=16, shard_size=32, epochs=5)


class WithRprop(Line):
    """Steps of a fixed size at first, whatever the gradient: no other optimizer moves a parameter so."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Rprop(model.parameters(), lr=0.125, etas=(0.999999, 1.000001))


class WithNone(Line):
    def optimizer(self, model: nn.Module) -> Any:
        return "adamw"


def trained(task: Task, settings: Hyperparameters) -> tuple[int, Any]:
    """Commits of one worker, and θ after the first of them less θ at the beginning."""
    with serving(config(settings)) as live, connect(live.address) as session:
        commits = train(task, session, settings, WorkerMetrics(CollectorRegistry()))
        torch.manual_seed(settings.seed)
        first = torch.cat([parameter.flatten() for parameter in task.model().parameters()])
        return commits, torch.from_numpy(session.read().copy()) - first.detach()


def test_the_steps_are_those_of_the_tasks_optimizer() -> None:
    commits, moved = trained(WithRprop(), Hyperparameters(**{**vars(OWN), "epochs": 0, "steps": 1}))
    assert commits == 1
    torch.testing.assert_close(moved.abs(), torch.full((2,), 0.125), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("task", "words"),
    [(Line(), r"give it a method optimizer\(model\)"), (WithNone(), r"must return a torch.optim.Optimizer, not str")],
)
def test_a_task_without_an_optimizer_is_told_what_the_run_needs(task: Task, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        trained(task, OWN)


def test_an_optimizer_that_the_run_does_not_use_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gem_worker"):
        trained(WithRprop(), Hyperparameters(**{**vars(OWN), "optimizer": "adamw", "learning_rate": 0.01}))
    (said,) = [record.getMessage() for record in caplog.records if record.name == "gem_worker"]
    assert said.startswith("the task's own optimizer is not used, because this run applies adamw on the server")
