"""The command gem-worker."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
from gem_api import __version__
from gem_api.process import logs
from gem_api.process.addresses import default_name
from gem_api.process.extras import needs
from gem_api.process.lifetime import end_with_launcher
from gem_api.process.options import SETTINGS, Whole, WithHeadings, credentials, log_options
from gem_api.process.settings_file import setting

from gem_worker.command import Stopped, exchange_options, log_as, member_options, pace_options, require_task, stop_on_signals
from gem_worker.process.stopping import Stopping


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@member_options
@click.option("--name", help="Name of the worker, unique in the run. Default: host name, process id and a random suffix.")
@click.option(
    "--workers",
    "workers_per_process",
    envvar="GEM_WORKERS_PER_PROCESS",
    type=Whole(1, 1000),
    default=1,
    help="Workers in this process, each with its own thread and session. If several, they are named NAME-0, NAME-1 …",
)
@click.option(
    "--first-worker",
    type=Whole(0),
    default=0,
    help="Number of the process's first worker, for names of several workers and for --device auto.",
)
@pace_options
@exchange_options
@setting(
    "stopped_status",
    type=Whole(0, 255),
    default=0,
    help="Exit status after SIGTERM or Ctrl-C. 143 tells Kubernetes that the run is not done, so that it replaces the worker.",
)
@click.option(
    "--metrics-listen",
    envvar=[
        "GEM_WORKER_METRICS_LISTEN",
        "GEM_METRICS_LISTEN",
    ],  # the second is the server's too, which may share the environment
    default="",
    help="Address to serve Prometheus metrics on, host:port; empty for none.",
)
@log_options
@click.version_option(__version__)
def main(**options: Any) -> None:
    """Joins the run of a GEM server as one or several workers, and trains until the run is done.

    The server provides the run's hyper-parameters. After SIGTERM or Ctrl-C the worker leaves the run and returns its shards.

    The workers of one process share the task's data and its loss function, which must not keep state between batches.

    Exit status: 0 if the run is done; 0 or the setting `stopped_status` after SIGTERM or Ctrl-C; 1 if the server rejects the
    worker or stays unreachable, if the worker no longer trains, or if the task fails; 2 for wrong use, or a task that does not
    fit the run; 3 if training diverged; 4 if the server quarantined this worker because it rejected too many of its gradients.
    A process with several workers ends when the last one has ended, with the worst status: 1 before 2 before 4 before 3 before
    `stopped_status` before 0.
    """
    security = credentials(options)
    log = logs.configure(options["log_format"], options["log_level"])
    require_task(options["task"], log)
    with needs("gem-worker", "torch"):
        from gem_worker.process.work import work
    name = options["name"] or default_name()
    log_as(name)
    stop_on_signals()
    end_with_launcher()
    try:
        status, busy = work(name, options, security, Stopping(), log)
    except Stopped:
        log.info("stopped before joining the run")
        status, busy = options["stopped_status"], False
    if busy:
        os._exit(status)  # the run has been left; the interpreter's shutdown crashes while threads are inside PyTorch
    sys.exit(status)
