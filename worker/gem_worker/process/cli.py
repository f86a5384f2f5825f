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
from gem_api.process.options import SETTINGS, WithHeadings, command_options, credentials

from gem_worker.command import Stopped, log_as, require_task, stop_on_signals
from gem_worker.process.stopping import Stopping


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@command_options("worker")
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
