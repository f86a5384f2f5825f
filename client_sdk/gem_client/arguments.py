"""Checks of what a caller gives `connect` and `commit`: a slip gets an error that says what to write."""

from __future__ import annotations

import math
import multiprocessing
from numbers import Integral, Real
from typing import Any

from gem_api.errors import InvalidRequest
from gem_api.optimizer_choice import OptimizerChoice

from gem_client.answer import Base
from gem_client.retry import Retry


def require_started() -> None:
    """Raises InvalidRequest in a child of `multiprocessing` that still imports the main script of its parent, as a loader's
    worker does that was spawned. The script would join the run from each of them."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself finds it out
        raise InvalidRequest(
            "this process was started by the script, for example to load data, and imports the script first, so it would join "
            'the run once more: put the script\'s code under `if __name__ == "__main__":`'
        )


def require_connection(name: Any, retry: Any, timeout: Any) -> None:
    """Raises InvalidRequest, with what to write, if one is not what its type says."""
    if not (name is None or isinstance(name, str)):
        raise InvalidRequest(f"name is a text, such as name={f'worker-{name}'!r}, not {name!r}")
    if not (retry is None or isinstance(retry, Retry)):
        raise InvalidRequest(f"retry is a gem_client.Retry, such as Retry(give_up_after=60), not {retry!r}")
    if not (isinstance(timeout, Real) and 0 < float(timeout) < math.inf):
        raise InvalidRequest(f"timeout is a number of seconds above 0, not {timeout!r}")


def as_choice(optimizer: Any) -> OptimizerChoice | None:
    """The optimizer that a worker brings, by name or as it is. Raises InvalidRequest, with what to write, if it is neither."""
    if isinstance(optimizer, str):
        return OptimizerChoice(optimizer)
    if not (optimizer is None or isinstance(optimizer, OptimizerChoice)):
        raise InvalidRequest(f'optimizer is "worker" for one of the worker\'s own, or an OptimizerChoice, not {optimizer!r}')
    return optimizer


def require_batches_per_step(count: Any) -> None:
    """Raises InvalidRequest if it is not a whole number above 0."""
    if not isinstance(count, Integral) or int(count) < 1:
        raise InvalidRequest(f"batches_per_step is a whole number, at least 1, not {count!r}")


def require_figures(loss: Any, samples: Any, batches: Any, base: Any, share: Any) -> None:
    """Raises InvalidRequest, with what to write, if an argument of a commit is not what its type says."""
    if loss is not None and not is_number(loss):
        raise InvalidRequest(f"loss is a number, such as loss.item(), not {loss!r}")
    for name, count in (("samples", samples), ("batches", batches)):
        if count is not None and not (isinstance(count, Integral) and int(count) >= 0):
            raise InvalidRequest(f"{name} is a whole number, at least 0, not {count!r}")
    if share is not None and not (is_number(share) and 0 < float(share) <= 1):
        raise InvalidRequest(f"share is the share of a whole batch, above 0 and at most 1, not {share!r}")
    if not (base is None or isinstance(base, Base)):
        raise InvalidRequest(f"base is what the session's property `base` was when the gradient was computed, not {base!r}")


def require_evaluation(loss: Any, accuracy: Any, version: Any) -> None:
    """Raises InvalidRequest, with what to write, if an argument of a report is not what its type says."""
    for name, figure in (("loss", loss), ("accuracy", 0 if accuracy is None else accuracy)):
        if not is_number(figure):
            raise InvalidRequest(f"{name} is a number, such as {name}.item(), not {figure!r}")
    whole = isinstance(version, Integral) and not isinstance(version, bool)
    if not (version is None or (whole and 0 <= int(version) < 1 << 63)):
        raise InvalidRequest(f"version is that of a θ, such as the session's read_version, not {version!r}")


def is_number(value: Any) -> bool:
    """Whether it is a number, or an array or a tensor that holds one."""
    if isinstance(value, (str, bytes)):
        return False  # float() would read them
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True
