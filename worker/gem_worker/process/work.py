"""Runs the workers of a process: the body of gem-worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gem_api.process import logs
from gem_api.process.host_limits import cores
from gem_api.process.http_port import serve_metrics
from gem_api.process.option_types import times
from gem_api.process.tracing import export
from gem_client import GemError, InvalidRequest, Retry, Session, connect
from prometheus_client.registry import CollectorRegistry

from gem_worker.command import EXIT_FAILED, EXIT_WRONG_USE, STOPPED
from gem_worker.compute_gate import TURNS, ComputeGate
from gem_worker.device import devices
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.pool import WorkerPool
from gem_worker.process.step_limits import StepLimits
from gem_worker.process.stopping import Stopping
from gem_worker.process.trainer import Start, run_hyperparameters, starts, train
from gem_worker.process.worker_thread import WorkerThread, worst
from gem_worker.tasks import TaskError, load_task


def work(
    name: str, options: dict[str, Any], security: dict[str, Any], stopping: Stopping, log: logs.Logger
) -> tuple[int, bool]:
    """Runs the workers of this process to their end.

    Args:
        name: The worker's name, or the beginning of the workers' names.
        options: The options of gem-worker.
        security: `token`, `tls_ca`, `tls_cert` and `tls_key` as for `connect`.
        stopping: Makes the workers leave the run once it has begun.
        log: Receives what happens.

    Returns:
        The exit status, and whether a thread still computes.

    Raises:
        Stopped: SIGTERM or Ctrl-C came, or stopping began, before a worker joined.
    """
    export("gem-worker", log)
    torch.set_num_threads(options["threads"])
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    try:
        serve_metrics(options["metrics_listen"], registry)
    except ValueError as error:
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE, False
    try:
        workers = _workers(_names(name, options), options, security, metrics, stopping, log)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        return EXIT_WRONG_USE, False
    except InvalidRequest as error:  # an unreadable file, or the address is not that of a GEM server
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE, False
    except GemError as error:
        log.error("can't get the run's hyper-parameters from the server", error=type(error).__name__, why=str(error))
        return EXIT_FAILED, False
    return _run(workers, stopping, metrics, options["stopped_status"], log)


def _run(
    workers: list[WorkerThread], stopping: Stopping, metrics: WorkerMetrics, stopped_status: int, log: logs.Logger
) -> tuple[int, bool]:
    """Runs the workers to their end and logs the time of each phase; returns the exit status, and whether one is busy."""
    pool = WorkerPool(workers, stopping)
    stopped = pool.run()
    status = worst(workers)
    if len(workers) > 1 or status in (0, STOPPED):  # a single worker that failed has logged why
        seconds = {f"{phase}_seconds": round(taken, 2) for phase, taken in metrics.seconds().items()}
        log.info("stopped" if stopped else "ended", workers=len(workers), **seconds)
    return stopped_status if status == STOPPED else status, pool.busy


def _names(name: str, options: dict[str, Any]) -> list[str]:
    """The names of the process's workers."""
    return [name] if options["workers_per_process"] == 1 else [f"{name}-{number}" for number in _numbers(options)]


def _numbers(options: dict[str, Any]) -> range:
    """The numbers of the process's workers."""
    return range(options["first_worker"], options["first_worker"] + options["workers_per_process"])


def _workers(
    names: list[str],
    options: dict[str, Any],
    security: dict[str, Any],
    metrics: WorkerMetrics,
    stopping: Stopping,
    log: logs.Logger,
) -> list[WorkerThread]:
    """The workers, not started. Raises TaskError, InvalidRequest for a device that does not exist, and GemError if the server
    does not send the run's hyper-parameters."""
    on = devices(options["device"], _numbers(options))
    task = load_task(options["task"], options["data"])
    retry = Retry(give_up_after=options["give_up_after"], sleep=stopping.sleep)
    hyperparameters = run_hyperparameters(options["server"], retry, **security)
    exchange = {key: options[key] for key in ("shared_memory", "gradient_dtype", "theta_dtype")}
    gates = {device: _gate(device, on.count(device), options) for device in on}
    seconds = times(options["step_seconds"])
    limits = [
        StepLimits(seconds[number % len(seconds)], sleep=stopping.sleep, gate=gates[device])
        for number, device in zip(_numbers(options), on, strict=True)
    ]
    shown = ", ".join(dict.fromkeys(map(str, on)))
    log.info(
        "training", server=options["server"], task=options["task"], rule=hyperparameters.rule, workers=len(names), device=shown
    )

    def session(name: str) -> Session:
        return connect(options["server"], name=name, retry=retry, **exchange, **security)

    def training(start: Start, device: torch.device, limits: StepLimits, session: Session) -> int:
        torch.set_num_threads(options["threads"])  # OpenMP keeps this number per thread
        return train(task, session, hyperparameters, metrics, options["overlap"], limits, device, start)

    return [
        WorkerThread(name, partial(session, name), partial(training, start, device, own), stopping, log)
        for name, start, device, own in zip(names, starts(task, hyperparameters.seed, len(names)), on, limits, strict=True)
    ]


def _gate(device: torch.device, workers: int, options: dict[str, Any]) -> ComputeGate | None:
    """What the workers on a device share. A GPU computes one gradient at a time, and holds its activations alone; a worker
    that has it alone waits for nobody."""
    slots = cores() // options["threads"] or 1 if device.type == "cpu" else 1
    return ComputeGate(slots, TURNS[options["turns"]]) if device.type == "cpu" or workers > 1 else None
