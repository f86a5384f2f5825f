"""Calls of the system that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn


def failing(number: int) -> Callable[..., NoReturn]:
    """A call that fails with this error of the system, such as errno.EMFILE."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call
