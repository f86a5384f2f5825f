"""The installed commands, by name. They import what they need, which takes seconds, only when they run: Ctrl-C then ends them
without a traceback."""

from __future__ import annotations

from importlib import import_module

from gem_api.process.lifetime import long_imports


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
    with long_imports():
        main = import_module(module).main
    main()
