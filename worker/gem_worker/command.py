"""What the commands of this package have in common: options, logs, exit statuses, how they are stopped."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import structlog
from gem_api.process.options import Number, ServerAddress, credential_options, option
from gem_api.wire import GRADIENT_FORMATS, THETA_FORMATS

from gem_worker.tasks import BUILT_IN

EXIT_FAILED, EXIT_WRONG_USE, EXIT_DIVERGED, EXIT_QUARANTINED = 1, 2, 3, 4

task_option = option("--task", default="digits", help=f"What to train: {', '.join(BUILT_IN)}, or your own as module:Class.")
data_option = option("--data", type=click.Path(path_type=Path), help="Folder of the task's data, for tasks that need one.")

step_seconds_option = option(
    "--step-seconds",
    type=Number(0),
    default=0.0,
    help="Simulated compute time: a gradient takes at least so long, the rest of it is slept. For experiments on machines with "
    "too few cores.",
)


def member_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every process that works on a server's run."""
    for decorate in (
        option("--give-up-after", type=Number(0), default=300.0, help="Seconds to wait for a server that is out of reach."),
        option("--threads", type=click.IntRange(1), default=1, help="Threads that PyTorch may use."),
        data_option,
        task_option,
        credential_options,
        option("--server", type=ServerAddress(), default="127.0.0.1:50051", help="The server's address."),
    ):
        command = decorate(command)
    return command


def exchange_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a worker exchanges gradients for parameters with its server."""
    for decorate in (
        option(
            "--shared-memory/--no-shared-memory",
            default=True,
            help="Share memory with a server on this machine, where it offers that, instead of sending tensors to it.",
        ),
        option(
            "--theta-dtype",
            type=click.Choice(list(THETA_FORMATS)),
            default="float32",
            help="How parameters come back over the network; shared memory makes it moot.",
        ),
        option(
            "--gradient-dtype",
            type=click.Choice(list(GRADIENT_FORMATS)),
            default="float32",
            help="How gradients go over the network: int8 has a scale for each 256 of them, and error feedback.",
        ),
        option(
            "--overlap/--no-overlap",
            default=False,
            help="Compute the next gradient while a commit is under way. Staleness grows by one; pays off where the network "
            "is slow.",
        ),
    ):
        command = decorate(command)
    return command


def exchange_flags(options: dict[str, Any]) -> list[str]:
    """The command-line flags that state what `exchange_options` were given."""
    switches = [f"--{'' if options[name] else 'no-'}{name.replace('_', '-')}" for name in ("shared_memory", "overlap")]
    return [*switches, f"--gradient-dtype={options['gradient_dtype']}", f"--theta-dtype={options['theta_dtype']}"]


class Stopped(BaseException):
    """SIGTERM or Ctrl-C: leave the run, whatever is going on. No Exception, so that nobody takes it for a failure."""


def stop_on_signals() -> None:
    """Has SIGTERM and Ctrl-C raise Stopped."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stopped)


def ignore_signals() -> None:
    """A second SIGTERM or Ctrl-C must not break off the orderly end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def log_as(name: str) -> None:
    """Marks the process's log lines with its name, and has the SDK's lines join them."""
    logging.basicConfig(level=logging.INFO, handlers=[_ToStructlog()])
    structlog.contextvars.bind_contextvars(worker=name)


def _raise_stopped(number: int, frame: Any) -> None:
    raise Stopped


class _ToStructlog(logging.Handler):
    """The SDK logs through the standard library; here that joins the process's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage())
