"""Errors that users see end in their own line and a sentence, without the frames of the transport in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from gem_api.errors import GemError

P = ParamSpec("P")
R = TypeVar("R")


def plain_errors(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose GemErrors have a traceback that begins here. Programming errors keep theirs."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except GemError as error:
            raise error.with_traceback(None) from error.__cause__

    return call
