"""The interface of an experiment tracker, as `follow` uses it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gem_api.process.extras import install
from gem_api.process.printable import without_password

TRACKERS = ("tensorboard", "mlflow", "wandb")
DEFAULT_PROJECT = "gem"


class TrackerError(Exception):
    """The tracker can't be used or does not respond; the message is one line that says why."""


class Tracker(Protocol):
    """A run in an experiment tracker. Every method may raise TrackerError."""

    def start(self, run_id: str, settings: dict[str, Any]) -> dict[str, int]:
        """Opens the run of this id, or creates it.

        Returns:
            For each metric that the run has already, the version of its last value: no value up to it is logged again.
        """
        ...

    def log(self, version: int, metrics: dict[str, float]) -> None:
        """Logs metrics of one version. The versions of one metric rise."""
        ...

    def save_model(self, path: Path) -> str:
        """Keeps a safetensors file with the run; returns where it is."""
        ...

    def finish(self, outcome: str | None) -> None:
        """Closes the run. `outcome` is None if tracking ends before the run does."""
        ...

    def where(self) -> str:
        """The folder or address where the user finds the run."""
        ...


def open_tracker(name: str, to: str | None) -> Tracker:
    """The tracker of this name, with its folder, address or project. Raises TrackerError if its library is missing."""
    try:
        module = importlib.import_module(f"gem_ctl.track.to_{name}")
    except ModuleNotFoundError as error:
        raise TrackerError(f"tracking with {name} needs {error.name}, which is not installed: {install(name)}") from error
    tracker: Tracker = module.open_tracker(to)
    return tracker


@contextmanager
def failing(what: str, kinds: tuple[type[Exception], ...], hint: str = "") -> Iterator[None]:
    """Raises TrackerError for errors of these kinds: `what` failed, why in one line without passwords, and a hint."""
    try:
        yield
    except kinds as error:
        why = without_password(" ".join(str(error).split())) or type(error).__name__
        raise TrackerError(f"{what}: {why if len(why) <= 300 else why[:297] + '...'}{hint}") from error
