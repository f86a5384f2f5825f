"""Shared by the commands of this package: logging, exit statuses, signal handling."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import Any

import structlog
from gem_api.process import logs
from gem_api.process.lifetime import ending_signals

from gem_worker.tasks import TaskError, require_name

EXIT_FAILED, EXIT_WRONG_USE, EXIT_DIVERGED, EXIT_QUARANTINED = 1, 2, 3, 4
STOPPED = -1  # stands for `stopped_status` until the process exits


def require_task(name: str, log: logs.Logger) -> None:
    """Ends the process if there is no such task, before PyTorch is imported."""
    try:
        require_name(name)
    except TaskError as error:
        log.error("the task can't be loaded", why=str(error))
        sys.exit(EXIT_WRONG_USE)


def program() -> str:
    """The command gem-train as the user typed it."""
    return sys.argv[0] if sys.argv[0].endswith("gem-train") else "gem-train"


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
