"""The interface of a task (model, data and loss), and how a task is loaded."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gem_api.named_settings import nearest
from gem_api.process.settings import BUILT_IN_TASKS

if TYPE_CHECKING:  # the options of a command need the names of the tasks, and not PyTorch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

BUILT_IN = {name: f"gem_worker.tasks.{name}:{name.capitalize()}" for name in BUILT_IN_TASKS}


class TaskError(Exception):
    """The task can't be loaded; the message says what to do."""


@runtime_checkable
class Task(Protocol):
    """A task for workers to train. Its class is called with the `--data` folder (a Path, or None).

    A batch is what a DataLoader returns for the data set; by convention a pair (inputs, targets).

    A task may also have `optimizer(model)`, which returns an optimizer of PyTorch for the model's parameters. Workers then make
    its steps and commit what they change, if the run has `--optimizer worker`, as gem-train's have unless told otherwise.
    """

    def model(self) -> nn.Module:
        """A new model. The caller sets PyTorch's seed first."""

    def training_data(self) -> Dataset[Any]:
        """The training set; it has a length, and must be the same in all workers."""

    def test_data(self) -> Dataset[Any]:
        """Held-out data."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, as a scalar."""

    def correct(self, model: nn.Module, batch: Any) -> int | Tensor | None:
        """The number of samples in a batch that the model classifies correctly, as an int or a scalar (which a GPU need not be
        waited for); None if the task has no accuracy."""


def has_optimizer(task: Task) -> bool:
    """Whether the task brings an optimizer of its own."""
    return getattr(task, "optimizer", None) is not None


def require_name(name: str) -> tuple[str, str]:
    """The module and the class of a task. Imports neither, nor PyTorch, which takes seconds.

    Raises:
        TaskError: There is no such task, or no such module.
    """
    module, _, class_ = BUILT_IN.get(name, name).partition(":")
    if module.endswith(".py"):
        right = f"{module.removesuffix('.py').replace('/', '.')}:{class_ or 'Class'}"
        raise TaskError(f"a task is named by its module, not by its file: --task {right}")
    if not class_.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        meant = nearest(name, BUILT_IN)
        raise TaskError(f"unknown task {name!r}{meant}: choose one of {', '.join(BUILT_IN)}, or give your own as module:Class")
    if "" not in sys.path:
        sys.path.insert(0, "")
    top = module.partition(".")[0]  # to look for a part of it would import it
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise TaskError(f"can't import {module!r} for task {name!r}: No module named {top!r}")
    return module, class_


def load_task(name: str, data: Path | None) -> Task:
    """The task of that name: "digits", "mnist", or "module:Class" from the current folder or an installed package.

    Raises:
        TaskError: The task does not exist, its class is not a Task, or its data is missing or damaged.
    """
    module_name, class_name = require_name(name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TaskError(f"can't import {module_name!r} for task {name!r}: {error}") from error
    if not hasattr(module, class_name):
        raise TaskError(f"module {module_name!r} has no class {class_name!r}")
    return _checked(name, getattr(module, class_name), data)


def _checked(name: str, make: Any, data: Path | None) -> Task:
    """Makes the task from its class. Raises TaskError if the class is not a Task's."""
    if not isinstance(make, type):
        raise TaskError(f"{name!r} is not a class")
    try:
        inspect.signature(make).bind(data)
    except TypeError as error:
        raise TaskError(f"{name!r} must accept the --data folder as its only argument: {error}") from None
    task = make(data)
    if not isinstance(task, Task):
        missing = [method for method in ("model", "training_data", "test_data", "loss", "correct") if not hasattr(task, method)]
        raise TaskError(f"{name!r} is not a task: it lacks {', '.join(missing)}")
    return task
