"""One worker's work: gradients of a task on leased shards, committed one after another until the run is done."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gem_client import Admin, Hyperparameters, NormOutOfBounds, Retry, Session
from gem_client.retry import logging_failures
from gem_client.torch import Optimizer, ShardSampler

from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.pace import FULL_SPEED, Pace
from gem_worker.tasks import Task

log = logging.getLogger("gem_worker")


def settings_of(address: str, retry: Retry, **credentials: Any) -> Hyperparameters:
    """The settings of the run at an address, asked for before joining it; credentials as for `Admin`."""
    with Admin(address, **credentials) as admin:
        return Hyperparameters.from_message(retry.call(admin.status, logging_failures("the run's settings")).hyperparameters)


def train(
    task: Task,
    session: Session,
    settings: Hyperparameters,
    metrics: WorkerMetrics,
    overlap: bool = False,
    pace: Pace = FULL_SPEED,
) -> int:
    """Trains until every epoch is done or this worker's steps are; returns the commits made, of one local step or several.

    With `overlap`, a gradient is computed while the one before it is under way. A batch whose gradient is too large for the
    server is left out. `pace` says how long a gradient takes at least.

    Raises:
        NonFiniteGradient: Training has diverged.
        Quarantined: Too many gradients in a row were refused.
        GemError: The server refuses the worker, or is out of reach for too long.
    """
    torch.manual_seed(settings.seed)
    data = task.training_data()  # before the lease, which would run out while a large data set is read
    torch.manual_seed(settings.seed)  # all workers make the same first value; only one is asked for it
    model = task.model()
    model.train()
    optimizer = Optimizer(model.named_parameters(), session, overlap=overlap)
    torch.manual_seed(settings.seed + zlib.crc32(session.name.encode()))  # each worker drops out other units
    sampler = ShardSampler(session, data)  # type: ignore[arg-type]
    loader = sampler.loader()
    before = session.steps_done
    while not sampler.complete:  # a loader that is ahead of the commits may come to its end more than once
        for batch in metrics.timing("data", loader):
            with metrics.phase("compute"), pace.step():
                optimizer.zero_grad()
                loss = task.loss(model, batch)
                loss.backward()
            with metrics.phase("exchange"):
                _leaving_out(partial(optimizer.step, loss=loss))
            metrics.loss(loss.item())
        if overlap or session.batches_per_commit > 1:
            with metrics.phase("exchange"):
                _leaving_out(optimizer.finish)
    return session.steps_done - before


def _leaving_out(exchange: Callable[[], object]) -> None:
    """An exchange with the server; where that finds a gradient too large, its batches are left out."""
    try:
        exchange()
    except NormOutOfBounds as error:
        log.warning("a batch is left out: %s", error)
