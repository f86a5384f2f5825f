"""What a worker trains: a model, its data, and how the two make a loss."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import Dataset

BUILT_IN = {
    "digits": "gem_worker.tasks.digits:Digits",
    "mnist": "gem_worker.tasks.mnist:Mnist",
}


class TaskError(Exception):
    """The task can't be loaded; the message says what to do."""


@runtime_checkable
class Task(Protocol):
    """A task is made by calling its class with the folder given as `--data` (a Path, or None).

    A batch is what a DataLoader makes of the data set's items; by convention a pair (inputs, targets).
    """

    def model(self) -> nn.Module:
        """A fresh model. The seed is set before the call."""

    def training_data(self) -> Dataset[Any]:
        """The training set; it has a length, and is the same for all workers."""

    def test_data(self) -> Dataset[Any]:
        """Held-out data."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, as a scalar."""

    def correct(self, model: nn.Module, batch: Any) -> int | None:
        """How many samples of a batch the model gets right; None where that means nothing."""


def load_task(name: str, data: Path | None) -> Task:
    """The task of that name: "digits", "mnist", or "module:Class" from the current folder or an installed package.

    Raises:
        TaskError: There is none, or its class does not fit, or its data is missing or damaged.
    """
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    if not class_name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise TaskError(f"no task is named {name!r}: choose from {', '.join(BUILT_IN)}, or name your own as module:Class")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise TaskError(f"can't import {module_name!r} for task {name!r}: {error}") from error
    except AttributeError:
        raise TaskError(f"module {module_name!r} has no class {class_name!r}") from None
    if not isinstance(make, type):
        raise TaskError(f"{name!r} is no class")
    try:
        inspect.signature(make).bind(data)
    except TypeError as error:
        raise TaskError(f"{name!r} can't be made from the folder given as --data alone: {error}") from None
    task = make(data)
    if not isinstance(task, Task):
        missing = [method for method in ("model", "training_data", "test_data", "loss", "correct") if not hasattr(task, method)]
        raise TaskError(f"{name!r} is no task: it lacks {', '.join(missing)}")
    return task
