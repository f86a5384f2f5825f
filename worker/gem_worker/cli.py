"""gem-worker: the command."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import click
import torch
from gem_api import __version__, logs
from gem_api.exposition import serve_metrics
from gem_api.lifetime import end_with_launcher
from gem_api.options import SETTINGS, credentials, log_format_option, option
from gem_client import GemError, NonFiniteGradient, Quarantined, Retry, connect
from prometheus_client.registry import CollectorRegistry

from gem_worker.command import (
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_QUARANTINED,
    EXIT_WRONG_USE,
    Stopped,
    exchange_options,
    log_as,
    member_options,
    stop_on_signals,
)
from gem_worker.metrics import WorkerMetrics
from gem_worker.tasks import TaskError, load_task
from gem_worker.trainer import settings_of, train


@click.command(context_settings=SETTINGS)
@member_options
@option("--name", help="What the worker calls itself; unique in the run. Host and process by default.")
@exchange_options
@option("--metrics-listen", default="", help="Address to serve Prometheus metrics on, host:port; empty for none.")
@log_format_option
@click.version_option(__version__)
def main(**options: Any) -> None:
    """Joins the run of a GEM server as one worker and trains until the run is done.

    The run's settings come from the server. SIGTERM or Ctrl-C leaves the run and hands the shard back; exit status 0.
    Exit status 3 means that training diverged, 4 that the server keeps this worker out because it refused too many of its
    gradients, 1 that the server refused or was out of reach too long.
    """
    log = logs.configure(options["log_format"])
    name = options["name"] or f"{socket.gethostname()}-{os.getpid()}"
    log_as(name)
    stop_on_signals()
    end_with_launcher()
    try:
        sys.exit(_work(name, options, log))
    except Stopped:
        log.info("stopped; left the run")
        sys.exit(0)


def _work(name: str, options: dict[str, Any], log: logs.Logger) -> int:
    security = credentials(options)
    torch.set_num_threads(options["threads"])
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    try:
        serve_metrics(options["metrics_listen"], registry)
    except ValueError as error:
        log.error("can't start", why=str(error))
        return EXIT_WRONG_USE
    try:
        task = load_task(options["task"], options["data"])
        retry = Retry(give_up_after=options["give_up_after"])
        settings = settings_of(options["server"], retry, **security)
        exchange = {key: options[key] for key in ("shared_memory", "gradient_dtype", "theta_dtype")}
        with connect(options["server"], name=name, retry=retry, **exchange, **security) as session:
            log.info("training", server=options["server"], task=options["task"], rule=settings.rule)
            steps = train(task, session, settings, metrics, options["overlap"])
            shared_memory = session.shares_memory
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        return EXIT_WRONG_USE
    except NonFiniteGradient as error:
        log.error("training diverged", why=str(error))
        return EXIT_DIVERGED
    except Quarantined as error:
        log.error("in quarantine: the server refused too many gradients of this worker", why=str(error))
        return EXIT_QUARANTINED
    except GemError as error:
        log.error("the run ended for this worker", error=type(error).__name__, why=str(error))
        return EXIT_FAILED
    seconds = {f"{phase}_seconds": round(taken, 2) for phase, taken in metrics.seconds().items()}
    log.info("done", commits=steps, shared_memory=shared_memory, **seconds)
    return 0
