"""What only some users need to have installed: the distribution's extras."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def install(extra: str) -> str:
    """How to install an extra."""
    return f'pip install "gem-ps[{extra}]"'


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """Around a command's imports of what an extra brings: without it, the command ends with one line and exit status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(f"{command} needs {error.name}, which is not installed: {install(extra)}")
