"""The installed commands, by name. They import what they need, which takes seconds, only when they run: Ctrl-C then ends them
without a traceback."""

from __future__ import annotations

import os
import signal
from importlib import import_module

from gem_api.process.lifetime import EXIT_INTERRUPTED


def gem_server() -> None:
    _run("gem_server.cli")


def gem_worker() -> None:
    _run("gem_worker.process.cli")


def gem_evaluator() -> None:
    _run("gem_worker.evaluation.evaluator")


def gem_train() -> None:
    _run("gem_worker.launcher.cli")


def gem_ctl() -> None:
    _run("gem_ctl.cli")


def _run(module: str) -> None:
    """Runs the command that is a module's `main`. From there on the command handles Ctrl-C itself."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in a script's background
        # Not an exception, which an import may catch or turn into another one; nothing has begun that needs an end.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    main = import_module(module).main
    signal.signal(signal.SIGINT, before)
    main()
