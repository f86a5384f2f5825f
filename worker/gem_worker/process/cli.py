"""gem-worker: the command."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from typing import Any

import click
from gem_api import __version__
from gem_api.process import logs
from gem_api.process.exposition import serve_metrics
from gem_api.process.extras import needs
from gem_api.process.lifetime import end_with_launcher
from gem_api.process.options import SETTINGS, WithHeadings, credentials, log_format_option, option
from gem_client import GemError, InvalidRequest, Retry, Session, connect
from prometheus_client.registry import CollectorRegistry

with needs("gem-worker", "torch"):
    import torch

from gem_worker.command import (
    EXIT_FAILED,
    EXIT_WRONG_USE,
    Stopped,
    exchange_options,
    log_as,
    member_options,
    step_seconds_option,
    stop_on_signals,
)
from gem_worker.process.compute_gate import Turns
from gem_worker.process.metrics import WorkerMetrics
from gem_worker.process.pace import Pace
from gem_worker.process.pool import Crew
from gem_worker.process.share import Share, shares
from gem_worker.process.stopping import Stopping
from gem_worker.process.trainer import settings_of, train
from gem_worker.process.worker_thread import LogicalWorker, worst
from gem_worker.tasks import TaskError, load_task


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@member_options
@option("--name", help="What the worker calls itself; unique in the run. Host and process by default.")
@option(
    "--workers",
    "workers_per_process",
    type=click.IntRange(1, 1000),
    default=1,
    help="Logical workers in this process, each a thread with a session of its own; several are called NAME-0, NAME-1 …",
)
@option("--first-worker", type=click.IntRange(0), default=0, help="Number of the first of several workers, instead of 0.")
@step_seconds_option
@exchange_options
@option(
    "--metrics-listen",
    envvar=[
        "GEM_WORKER_METRICS_LISTEN",
        "GEM_METRICS_LISTEN",
    ],  # the second is the server's too, which may share the environment
    default="",
    help="Address to serve Prometheus metrics on, host:port; empty for none.",
)
@log_format_option
@click.version_option(__version__)
def main(**options: Any) -> None:
    """Joins the run of a GEM server as one worker, or as several, and trains until the run is done.

    The run's settings come from the server. SIGTERM or Ctrl-C leaves the run and hands the shards back.

    The workers of one process share the task's data and its loss function, which must not keep anything from one batch to
    the next.

    Exit status: 0 if the run is done, or after SIGTERM or Ctrl-C; 1 if the server refuses or is out of reach too long, or the
    task fails; 2 for wrong use, or a task that does not fit the run; 3 if training diverged; 4 if the server keeps this worker
    out because it refused too many of its gradients. Several workers end one by one; the process ends with the last of them,
    with the worst status: 1 before 2 before 4 before 3.
    """
    log = logs.configure(options["log_format"])
    name = options["name"] or f"{socket.gethostname()}-{os.getpid()}"
    log_as(name)
    stop_on_signals()
    end_with_launcher()
    try:
        status = _work(name, options, log)
    except Stopped:
        log.info("stopped before it had joined the run")
        status = 0
    sys.exit(status)


def _work(name: str, options: dict[str, Any], log: logs.Logger) -> int:
    """The process's whole work; returns its exit status."""
    torch.set_num_threads(options["threads"])
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    try:
        serve_metrics(options["metrics_listen"], registry)
    except ValueError as error:
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE
    stopping = Stopping()
    try:
        workers = _workers(_names(name, options), options, metrics, stopping, log)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        return EXIT_WRONG_USE
    except InvalidRequest as error:  # a file that can't be read, or something else than a GEM server
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE
    except GemError as error:
        log.error("the server can't be asked for the run's settings", error=type(error).__name__, why=str(error))
        return EXIT_FAILED
    crew = Crew(workers, stopping)
    stopped = crew.run()
    status = worst(workers)
    if len(workers) > 1 or status == 0:  # one that failed has had the last word
        seconds = {f"{phase}_seconds": round(taken, 2) for phase, taken in metrics.seconds().items()}
        log.info("stopped" if stopped else "ended", workers=len(workers), **seconds)
    if crew.busy:
        os._exit(status)  # it has left the run; the interpreter's own end does not bear threads inside PyTorch
    return status


def _names(name: str, options: dict[str, Any]) -> list[str]:
    """The logical workers' names."""
    count, first = options["workers_per_process"], options["first_worker"]
    return [name] if count == 1 else [f"{name}-{first + number}" for number in range(count)]


def _workers(
    names: list[str], options: dict[str, Any], metrics: WorkerMetrics, stopping: Stopping, log: logs.Logger
) -> list[LogicalWorker]:
    """The workers, ready to start. Raises TaskError, and GemError where the server can't be asked for the settings."""
    security = credentials(options)
    task = load_task(options["task"], options["data"])
    retry = Retry(give_up_after=options["give_up_after"], sleep=stopping.sleep)
    settings = settings_of(options["server"], retry, **security)
    exchange = {key: options[key] for key in ("shared_memory", "gradient_dtype", "theta_dtype")}
    pace = Pace(options["step_seconds"], sleep=stopping.sleep, turns=Turns(_cores() // options["threads"] or 1))
    log.info("training", server=options["server"], task=options["task"], rule=settings.rule, workers=len(names))

    def session(name: str) -> Session:
        return connect(options["server"], name=name, retry=retry, **exchange, **security)

    def training(share: Share, session: Session) -> int:
        torch.set_num_threads(options["threads"])  # which OpenMP counts by thread
        return train(share, session, settings, metrics, options["overlap"], pace)

    own = shares(task, settings.seed, len(names))
    return [
        LogicalWorker(name, partial(session, name), partial(training, share), stopping, log)
        for name, share in zip(names, own, strict=True)
    ]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
