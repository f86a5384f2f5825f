"""Shared by the commands of this package: options, logging, exit statuses, signal handling."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import structlog
from gem_api.process import logs
from gem_api.process.lifetime import ending_signals
from gem_api.process.options import Number, ServerAddress, Whole, credential_options, together
from gem_api.process.settings_file import config_option, setting
from gem_api.wire import WIRE_FORMATS

from gem_worker.compute_gate import TURNS
from gem_worker.tasks import BUILT_IN, TaskError, require_name

EXIT_FAILED, EXIT_WRONG_USE, EXIT_DIVERGED, EXIT_QUARANTINED = 1, 2, 3, 4
STOPPED = -1  # stands for `stopped_status` until the process exits

task_option = click.option(
    "--task", default="digits", help=f"Task to train: {', '.join(BUILT_IN)}, or your own as module:Class."
)
data_option = click.option(
    "--data", type=click.Path(path_type=Path), help="Folder with the task's data, if the task needs one."
)

device_option = click.option(
    "--device",
    default="cpu",
    help="Device to compute on: cpu, cuda, cuda:N, mps, or auto. auto deals the machine's CUDA devices to the workers in turn.",
)

# When workers of one machine compute their gradients.
pace_options = together(
    setting(
        "step_seconds",
        type=Number(0),
        default=0.0,
        help="Simulated compute time: the minimum time for the gradient of a whole batch; the worker sleeps for the rest. With "
        "batch_variation or smallest_share it is in proportion to the batch. For experiments on machines with few cores.",
    ),
    setting(
        "turns",
        type=click.Choice(list(TURNS)),
        default="random",
        help="Which worker computes next if a process has more workers than cores. random: any that waits. fixed: first come, "
        "first served, so that they commit in lockstep, as workers on equal machines do, even with "
        "batch_variation; for experiments.",
    ),
)


def evaluate_every_setting(seconds: float) -> Callable[[Any], Any]:
    """How often a command evaluates the model, by default."""
    return setting("evaluate_every", type=Number(0.1), default=seconds, help="Minimum seconds between two evaluations.")


# Every process that connects to a run has these: gem-worker and gem-evaluator.
member_options = together(
    config_option,
    click.option("--server", type=ServerAddress(), default="127.0.0.1:50051", help="Address of the server."),
    credential_options,
    task_option,
    data_option,
    device_option,
    click.option("--threads", type=Whole(1), default=1, help="Number of threads that PyTorch uses."),
    setting("give_up_after", type=Number(0), default=300.0, help="Seconds to keep retrying an unreachable server."),
)

# How a worker sends gradients to the server and receives parameters; see `exchange_flags`.
exchange_options = together(
    click.option(
        "--overlap/--no-overlap",
        default=False,
        help="Compute the next gradient while a commit is in progress. Staleness about doubles; worth it on a slow network.",
    ),
    click.option(
        "--gradient-dtype",
        type=click.Choice(list(WIRE_FORMATS)),
        default="float32",
        help="Format of gradients sent over the network. int8 has one scale per 256 elements, and error feedback.",
    ),
    click.option(
        "--theta-dtype",
        type=click.Choice(list(WIRE_FORMATS)),
        default="float32",
        help="Format of parameters sent over the network; not used with shared memory. int8 sends their changes.",
    ),
    setting(
        "shared_memory",
        default=True,
        help="Exchange tensors through shared memory if the server runs on this machine and offers it.",
    ),
)


def exchange_flags(options: dict[str, Any]) -> list[str]:
    """The values of `exchange_options` as command-line flags, for a process to be started, but for `shared_memory`."""
    overlap = "--overlap" if options["overlap"] else "--no-overlap"
    return [overlap, f"--gradient-dtype={options['gradient_dtype']}", f"--theta-dtype={options['theta_dtype']}"]


def require_task(name: str, log: logs.Logger) -> None:
    """Ends the process if there is no such task, before PyTorch is imported."""
    try:
        require_name(name)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        sys.exit(EXIT_WRONG_USE)


class Stopped(BaseException):
    """SIGTERM or Ctrl-C: leave the run now. A BaseException, so that `except Exception` does not catch it."""


def stop_on_signals() -> None:
    """Makes SIGTERM, Ctrl-C and a terminal that closes raise Stopped in the main thread."""
    for number in ending_signals():
        signal.signal(number, _raise_stopped)


def ignore_signals() -> None:
    """Ignores the signals that end a command, so that a second one does not interrupt the shutdown. Does nothing outside the
    main thread, which alone receives them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)


def log_as(name: str) -> None:
    """Adds the process's name to its log lines, and sends the SDK's log lines to the same log."""
    logging.basicConfig(level=logging.INFO, handlers=[_ToStructlog()])
    structlog.contextvars.bind_contextvars(worker=name)


def _raise_stopped(number: int, frame: Any) -> None:
    raise Stopped


class _ToStructlog(logging.Handler):
    """Forwards what the SDK logs through the standard library to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage())
