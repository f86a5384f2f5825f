"""The results of all runs in one JSON file, a line for each, and the conditions that they were measured under."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.results import DamagedError, Store
from benchmarks.models.runs import Outcome, Run

_PACKAGES = ("torch", "numpy", "numba", "grpcio")


def stored(path: Path) -> Store[Run, Outcome]:
    """The stored results. Raises DamagedError."""
    head = {"format": 1, "conditions": here()}
    return Store(path, "run", Run, lambda outcome: vars(outcome), lambda run, row: Outcome(**row), head)


def require_same_text(store: Store[Run, Outcome]) -> None:
    """Raises DamagedError if this Python's library, which the runs train on, is another text than that of the results."""
    theirs = store.head["conditions"].get("python")
    if theirs != platform.python_version():
        raise DamagedError(
            f"the results in {store.path} are on the standard library of Python {theirs}, and this is "
            f"{platform.python_version()}: continue with that version, or give another --out"
        )


def here() -> dict[str, Any]:
    """The conditions of runs on this machine: processor, cores, memory, system, Python and libraries."""
    return {**machine.description(), **{name: metadata.version(name) for name in _PACKAGES}}
