"""gem-worker: the command."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click
import structlog
import torch
from gem_api import __version__, logs
from gem_api.exposition import serve_metrics
from gem_api.lifetime import end_with_launcher
from gem_api.options import SETTINGS, Number, log_format_option, option
from gem_client import GemError, NonFiniteGradient, Retry, connect
from prometheus_client.registry import CollectorRegistry

from gem_worker.metrics import WorkerMetrics
from gem_worker.tasks import BUILT_IN, TaskError, load_task
from gem_worker.trainer import settings_of, train

EXIT_FAILED, EXIT_WRONG_USE, EXIT_DIVERGED = 1, 2, 3


class Stopped(BaseException):
    """SIGTERM or Ctrl-C: leave the run, whatever is going on. No Exception, so that nobody takes it for a failure."""


@click.command(context_settings=SETTINGS)
@option("--server", default="127.0.0.1:50051", help="The server's address, host:port.")
@option("--task", default="digits", help=f"What to train: {', '.join(BUILT_IN)}, or your own as module:Class.")
@option("--data", type=click.Path(path_type=Path), help="Folder of the task's data, for tasks that need one.")
@option("--name", help="What the worker calls itself; unique in the run. Host and process by default.")
@option("--threads", type=click.IntRange(1), default=1, help="Threads that PyTorch may use.")
@option("--give-up-after", type=Number(0), default=300.0, help="Seconds to wait for a server that is out of reach.")
@option("--metrics-listen", default="", help="Address to serve Prometheus metrics on, host:port; empty for none.")
@log_format_option
@click.version_option(__version__)
def main(**options: Any) -> None:
    """Joins the run of a GEM server as one worker and trains until the run is done.

    The run's settings come from the server. SIGTERM or Ctrl-C leaves the run and hands the shard back; exit status 0.
    Exit status 3 means that training diverged, 1 that the server refused or was out of reach too long.
    """
    log = logs.configure(options["log_format"])
    logging.basicConfig(level=logging.INFO, handlers=[_ToStructlog()])
    name = options["name"] or f"{socket.gethostname()}-{os.getpid()}"
    structlog.contextvars.bind_contextvars(worker=name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)
    end_with_launcher()
    try:
        sys.exit(_work(name, options, log))
    except Stopped:
        log.info("stopped; left the run")
        sys.exit(0)


def _work(name: str, options: dict[str, Any], log: logs.Logger) -> int:
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
        settings = settings_of(options["server"], retry)
        with connect(options["server"], name=name, retry=retry) as session:
            steps = train(task, session, settings, metrics)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        return EXIT_WRONG_USE
    except NonFiniteGradient as error:
        log.error("training diverged", why=str(error))
        return EXIT_DIVERGED
    except GemError as error:
        log.error("the run ended for this worker", error=type(error).__name__, why=str(error))
        return EXIT_FAILED
    log.info("done", commits=steps)
    return 0


def _raise_stopped(number: int, frame: Any) -> None:
    raise Stopped


class _ToStructlog(logging.Handler):
    """The SDK logs through the standard library; here that joins the worker's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage())
