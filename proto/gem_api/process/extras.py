"""The extras of the distribution: dependencies that only some commands need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gem_api.process.lifetime import long_imports


def install(extra: str) -> str:
    """The command that installs an extra. Not by the package's name: no index has it, or not ours."""
    return f'pip install ".[{extra}]" in a clone of this project'


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """As `long_imports`, for imports from an extra. If it is missing, the command exits with one line and status 1."""
    try:
        with long_imports():
            yield
    except ModuleNotFoundError as error:
        sys.exit(f"{command} needs {error.name}, which is not installed: {install(extra)}")
