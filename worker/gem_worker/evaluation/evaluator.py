"""The command gem-evaluator: evaluates a running server's θ on held-out data at intervals."""

from __future__ import annotations

import sys
from typing import Any

import click
from gem_api import __version__
from gem_api.process import logs
from gem_api.process.extras import needs
from gem_api.process.options import SETTINGS, WithHeadings, command_options, credentials

from gem_worker.command import Stopped, log_as, require_task, stop_on_signals


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@command_options("evaluator")
@click.version_option(__version__)
def main(**options: Any) -> None:
    """Evaluates a GEM server's model on the task's held-out data, and reports loss and accuracy to the server.

    It does not train. Every few seconds it asks for the version and evaluates a new one, until SIGTERM or Ctrl-C.

    Exit status: 0 after SIGTERM or Ctrl-C, or after --once; 1 if the server rejects the request or stays unreachable, or if the
    task fails or is not the run's; 2 for wrong use, or a task that can't be loaded.
    """
    security = credentials(options)
    log = logs.configure(options["log_format"], options["log_level"])
    require_task(options["task"], log)
    with needs("gem-evaluator", "torch"):
        from gem_worker.evaluation.evaluate import follow
    log_as("evaluator")
    stop_on_signals()
    try:
        sys.exit(follow(options, security, log))
    except Stopped:
        log.info("stopped")
        sys.exit(0)


if __name__ == "__main__":
    main(prog_name="gem-evaluator")
