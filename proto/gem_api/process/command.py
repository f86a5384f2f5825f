"""The installed commands, by name. They import what they need, which takes seconds, only when they run: Ctrl-C then ends them
without a traceback."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from gem_api.process.bytecode import start_without_damaged

try:
    from gem_api.process.lifetime import long_imports
    from gem_api.process.surroundings import settle
except Exception as error:
    start_without_damaged(error)
    raise

_ABOUT_ITSELF = {"--help", "-h", "--version"}


def gem_server() -> None:
    _run("gem_server.cli", "gem-server")


def gem_worker() -> None:
    _run("gem_worker.process.cli", "gem-worker")


def gem_evaluator() -> None:
    _run("gem_worker.evaluation.evaluator", "gem-evaluator")


def gem_train() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy starts threads: workers begin as copies of a process without any
    _run("gem_worker.launcher.cli", "gem-train")


def gem_ctl() -> None:
    _run("gem_ctl.cli", "gem-ctl")


def _run(module: str, name: str) -> None:
    """Runs the command that is a module's `main`. From there on the command handles Ctrl-C itself."""
    settle()
    with long_imports():
        main = import_module(module).main
    try:
        main(prog_name=name)
    except OSError as error:
        if error.strerror is None or not _ABOUT_ITSELF.intersection(sys.argv):
            raise
        sys.exit(f"{name}: can't write to standard output: {error.strerror}")
