"""Files that are read again when they change."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gem_api.process.logs import Logger

T = TypeVar("T")


class Reloaded(Generic[T]):
    """What some files hold. While changed files can't be used, for example a new certificate before its key, what they held
    before stays in use.

    Args:
        what: What the files are, for the log.
        paths: The files.
        read: Reads all of them. Raises ValueError if they can't be used.
        logger: Told of each change.

    Raises:
        ValueError: The files can't be used.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T], logger: Logger) -> None:
        self._what, self._paths, self._read, self._logger = what, paths, read, logger
        self._lock = threading.Lock()
        self._seen = self._refused = self._stamps()
        self._value = read()

    def newest(self) -> T:
        """What the files hold, or held when they could last be used. The same object until they change. From any thread."""
        with self._lock:
            stamps = self._stamps()
            if stamps != self._seen:
                self._read_again(stamps)
            return self._value

    def _read_again(self, stamps: list[tuple[int, ...]]) -> None:
        try:
            self._value = self._read()
        except ValueError as error:
            if stamps != self._refused:
                self._logger.warning(f"can't use the changed {self._what}; the previous one stays in use", why=str(error))
            self._refused = stamps
            if _may_pass(error):
                return  # the next call tries again
        else:
            self._logger.info(f"{self._what} reloaded", path=str(self._paths[0]))
        self._seen = stamps

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when the file does; empty if the file can't be read."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _may_pass(error: BaseException) -> bool:
    """Whether a file could not be read for now, as by a process with too many open files; else its content is wrong."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)
