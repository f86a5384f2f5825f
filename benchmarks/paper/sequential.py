"""Sequential SGD with momentum, the baseline for GEM: one process, no server, the task's own model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gem_worker.launcher.run_folder import versions
from gem_worker.tasks import Task, load_task
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.paper.experiments import Experiment
from benchmarks.paper.results import Result, thin

_TEST_BATCH = 500
_EVALUATE = 40  # times


def run(experiment: Experiment, data: Path | None) -> Result:
    """Trains for the experiment's steps. Raises TaskError."""
    began = time.monotonic()
    torch.set_num_threads(1)
    task = load_task(experiment.task, data)
    torch.manual_seed(experiment.seed)
    model = task.model().train()
    # PyTorch's momentum, m <- mu m + g, theta <- theta - eta m, is Eq. 24 with the learning rate taken out.
    optimizer = torch.optim.SGD(model.parameters(), lr=experiment.learning_rate, momentum=experiment.momentum)
    losses, sizes, times = (np.full(experiment.steps, np.nan) for _ in range(3))
    scores: list[tuple[int, float, float]] = []
    evaluate_at = set(np.linspace(1, experiment.steps, _EVALUATE).round().astype(int).tolist())
    for step, batch in enumerate(_batches(task, experiment), 1):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses[step - 1], sizes[step - 1], times[step - 1] = loss.item(), len(batch[0]), time.monotonic() - began
        if step in evaluate_at:
            scores.append((step, *score(task, model)))
    curves = {"version": np.arange(1.0, experiment.steps + 1), "samples": np.cumsum(sizes), "seconds": times, "loss": losses}
    table = np.array(scores, float)
    evaluations = {"version": table[:, 0], "loss": table[:, 1], "accuracy": table[:, 2]}
    _, test_loss, test_accuracy = scores[-1]
    outcome = "complete" if np.isfinite(losses).all() else "diverged"
    return Result(
        experiment, outcome, test_accuracy, test_loss if math.isfinite(test_loss) else None, time.monotonic() - began,
        thin(curves), thin(evaluations), {}, asdict(experiment), versions(),
    )  # fmt: skip


def _batches(task: Task, experiment: Experiment) -> Iterator[Any]:
    """One batch for each step; the data is shuffled again in each epoch."""
    loader: DataLoader[Any] = DataLoader(
        task.training_data(), batch_size=experiment.batch_size, shuffle=True, drop_last=True,
        generator=torch.Generator().manual_seed(experiment.seed),
    )  # fmt: skip
    return islice(chain.from_iterable(repeat(loader)), experiment.steps)


@torch.no_grad()
def score(task: Task, model: nn.Module, data: Any = None) -> tuple[float, float]:
    """Mean loss and share of correct answers on these data, by default all that are held out."""
    model.eval()
    loss = correct = samples = 0.0
    for batch in DataLoader(task.test_data() if data is None else data, batch_size=_TEST_BATCH):
        loss += float(task.loss(model, batch)) * len(batch[0])
        correct += int(task.correct(model, batch) or 0)
        samples += len(batch[0])
    model.train()
    return loss / samples, correct / samples
