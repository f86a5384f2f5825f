"""Prints lines that tell a user how a program gets on. The program depends on none of them: if one can't be written, it goes
on."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

from gem_api.process.logs import Lines

_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # of a pipe, of a terminal, and a descriptor that was closed


def say(line: str) -> None:
    """Prints a line to standard output, if it can be written. A full disk may have room for the next one."""
    try:
        Lines(sys.stdout, str).write(f"{line}\n")
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        if isinstance(error, OSError) and error.errno in _READER_GONE:
            _drop_output()


def end_output() -> None:
    """Writes out what libraries and tasks have printed. Else the interpreter would do so, and change the exit status if it
    can't."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop_output()
    except AttributeError:  # None: standard output was closed when the process began
        pass


def _drop_output() -> None:
    """From here on, standard output goes nowhere: what a task prints, in this process or a child, can't fail either."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
