"""Trains one worker: computes gradients on leased shards and commits them until the run is done."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from gem_api.process.tracing import each_in_a_span
from gem_client import Admin, Hyperparameters, NormOutOfBounds, Retry, Session
from gem_client.retry import FailureLog
from gem_client.torch import Optimizer, ShardSampler
from torch import nn
from torch.utils.data import Dataset

from gem_worker.device import CPU, moved, pins, use
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.step_limits import NO_LIMITS, StepLimits
from gem_worker.tasks import Task, TaskError, has_optimizer

log = logging.getLogger("gem_worker")


def run_hyperparameters(address: str, retry: Retry, **credentials: Any) -> Hyperparameters:
    """Asks a server for the hyper-parameters of its run, without joining it; `credentials` as for `Admin`."""
    failures = FailureLog("the run's settings")
    with Admin(address, **credentials) as admin:
        status = retry.call(admin.status, failures.failed, failures.recovered)
        return Hyperparameters.from_message(status.hyperparameters)


class Start(NamedTuple):
    """What a worker begins with: the training set, which the workers of a process share, and a model of its own."""

    data: Dataset[Any]
    model: nn.Module


def starts(task: Task, seed: int, count: int) -> list[Start]:
    """What each of `count` workers begins with: the data, loaded once, and models with the same values; one of them is sent.

    PyTorch has one random generator per process, so the models are made here, before any worker draws from it. Later draws,
    for dropout, depend on the order of the workers' steps.
    """
    torch.manual_seed(seed)
    data = task.training_data()

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return task.model()

    return [Start(data, model()) for _ in range(count)]


def train(
    task: Task,
    session: Session,
    hyperparameters: Hyperparameters,
    metrics: WorkerMetrics,
    overlap: bool = False,
    limits: StepLimits = NO_LIMITS,
    device: torch.device = CPU,
    start: Start | None = None,
) -> int:
    """Trains until all epochs, or this worker's steps, are done; returns the number of commits.

    With `overlap`, the next gradient is computed while a commit is in progress. If the server rejects a gradient as too large,
    its batch is skipped. `limits` says when a gradient may be computed, and its minimum time. The model and the batches are
    moved to `device`. A worker that has it for itself reads the next batch while it computes. `start` is one of `starts`, for
    one of several workers of the process.

    Raises:
        NonFiniteGradient: Training has diverged.
        Quarantined: The server rejected too many gradients in a row.
        GemError: The server rejects the worker, or stays unreachable for too long.
        TaskError: The run has `--optimizer worker`, and the task has no optimizer.
    """
    use(device)
    # Before the lease, which would expire while a large data set is read.
    data, model = start or starts(task, hyperparameters.seed, 1)[0]
    model.to(device).train()
    names = model.named_parameters()
    optimizer = Optimizer(_trained(task, model, hyperparameters), session, on="worker", overlap=overlap, names=names)
    torch.manual_seed(hyperparameters.seed + zlib.crc32(session.name.encode()))  # so that each worker's dropout differs
    sampler = ShardSampler(session, data)  # type: ignore[arg-type]
    loader = sampler.loader(pin_memory=pins(device))
    batches_differ = hyperparameters.batch_variation > 0 or hyperparameters.smallest_share < 1
    has_device = device != CPU and limits.gate is None  # for itself
    # Reading a loss waits for its gradient: before another worker gets its turn, and before a commit; not between local steps.
    reads_each = not has_device or session.batches_per_commit == 1
    before = session.steps_done
    while not sampler.complete:  # a loader that runs ahead of the commits may end more than once
        batches = loader.ahead(partial(metrics.timing, "data"))
        for batch in each_in_a_span("step", batches):
            share = sampler.samples_in_hand / hyperparameters.batch_size if batches_differ else 1.0
            with metrics.phase("compute"), limits.step(share):
                optimizer.zero_grad()
                loss = task.loss(model, moved(batch, device))
                loss.backward()
                if has_device:
                    batches.read()  # while it computes
                value = loss.item() if reads_each else loss.detach()
            with metrics.phase("exchange"):
                last = optimizer.answer
                _skip_if_too_large(partial(optimizer.step, loss=value))
            if reads_each or optimizer.answer is not last:
                metrics.trained(float(value), max(float(group["lr"]) for group in optimizer.param_groups))
        if overlap or session.batches_per_commit > 1:
            with metrics.phase("exchange"):
                _skip_if_too_large(optimizer.finish)
    return session.steps_done - before


def optimizer_of(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The task's own optimizer for a model. Raises TaskError if it has none, or returns something else."""
    if not has_optimizer(task):
        raise TaskError(
            "in this run each worker makes the steps of its own optimizer (--optimizer worker), and the task has none: give it "
            "a method optimizer(model), or start the run with another --optimizer"
        )
    made = task.optimizer(model)  # type: ignore[attr-defined]  # optional
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(f"the task's optimizer(model) must return a torch.optim.Optimizer, not {type(made).__name__}")
    return made


def _trained(task: Task, model: nn.Module, hyperparameters: Hyperparameters) -> Any:
    """The model's parameters, or the task's own optimizer, for this worker to train. Raises TaskError."""
    if hyperparameters.optimizer == "worker":
        return optimizer_of(task, model)
    if has_optimizer(task):
        log.warning(
            "the task's own optimizer is not used, because this run applies %s on the server: start it with --optimizer worker",
            hyperparameters.optimizer,
        )
    return model.named_parameters()


def _skip_if_too_large(exchange: Callable[[], object]) -> None:
    """Calls `exchange`; logs a warning and continues if the server rejects the gradient as too large."""
    try:
        exchange()
    except NormOutOfBounds as error:
        log.warning("batch skipped: %s", error)
