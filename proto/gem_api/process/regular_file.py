"""Reads a file that somebody else may have made: a pipe, a device or a file without an end must not hold the reader up."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

MAX_BYTES = 1 << 26  # of a small file, such as the summary of a run


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Opens a file to be read, without waiting for a pipe's writer. Raises OSError, or ValueError if it is not a file."""
    try:
        opened = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    except IsADirectoryError:
        raise ValueError(f"{path} is not a regular file") from None
    with opened as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        yield file


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises OSError or ValueError."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} has more than the {limit} bytes that such a file may have")
    return content
