"""Writes what a command makes: to a file, to standard output, or to a pipe or device."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gem_api.process.logs import print_error
from gem_api.process.progress import say


def is_standard_output(out: Path) -> bool:
    """Whether this is "-", or a path to the file behind standard output, such as /dev/stdout."""
    if str(out) == "-":
        return True
    try:
        return os.path.samestat(out.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):
        return False


def write(out: Path, content: bytes) -> None:
    """Replaces a file at once, and follows a symbolic link. A pipe or device is written to, never replaced. Raises OSError."""
    if is_standard_output(out):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    elif out.exists() and not out.is_file():  # a pipe or a device
        out.write_bytes(content)
    else:
        replace(Path(os.path.realpath(out)), lambda scratch: scratch.write_bytes(content))


def write_and_tell(out: Path, content: bytes, what: str) -> None:
    """As `write`, and then prints what was written: to standard error if standard output has the content. Raises OSError."""
    write(out, content)
    (print_error if is_standard_output(out) else say)(f"wrote {out}: {what}")


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` make a file beside `path`, and puts it there once it is whole. What `write` raises leaves no file behind."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))  # not the scratch file's name
    try:
        write(scratch)
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
