"""Structured logs on standard error, as text or JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

import structlog

from gem_api.process.printable import printable

Logger = structlog.typing.FilteringBoundLogger


class Lines:
    """Writes lines to a stream, for structlog. It counts a line that can't be written, and raises nothing: a full disk, or a
    reader that has gone, must not end what is logged about.

    Args:
        stream: Where to.
        as_line: Renders the note about lost lines, which precedes the next line.
    """

    def __init__(self, stream: TextIO, as_line: Callable[[str], str]) -> None:
        self._stream = stream
        self._as_line = as_line
        self._lock = threading.Lock()
        self._lost = 0
        self._cut = False  # whether the stream ends within a line

    def msg(self, line: str) -> None:
        with self._lock:
            try:
                self.write("\n" * self._cut + self._note() + line + "\n")
                self._lost = 0
            except (OSError, ValueError):  # ValueError: the stream is closed
                self._lost += 1

    debug = info = warning = warn = error = critical = fatal = exception = log = msg

    def _note(self) -> str:
        lines = "lines" if self._lost > 1 else "line"
        return self._as_line(f"{self._lost} log {lines} before this one could not be written") + "\n" if self._lost else ""

    def write(self, text: str) -> None:
        """Writes text past the stream's buffer. Raises OSError, or ValueError if the stream is closed."""
        descriptor = _descriptor(self._stream)
        if descriptor is None:
            print(text, end="", file=self._stream, flush=True)
            return
        # Not through the stream's buffer: it would keep what failed, and fail again with the next line and at the exit.
        rest = memoryview(text.encode(self._stream.encoding, "backslashreplace"))
        while rest:
            rest = rest[os.write(descriptor, rest) :]
            self._cut = bool(rest)


def _descriptor(stream: TextIO) -> int | None:
    """The stream's file descriptor; None for a stand-in, such as Ray's, which must see what is written. Raises ValueError if
    the stream is closed."""
    try:
        return stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except io.UnsupportedOperation:
        return None


class _OfLibraries(logging.Handler):
    """Logs what libraries log by the standard module, unless somebody has set up that module."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            structlog.get_logger().log(record.levelno, record.getMessage(), exc_info=record.exc_info, logger=record.name)
        except Exception:  # the library's own message may not fit its arguments
            structlog.get_logger().warning("a library logged what can't be shown", logger=record.name)


def configure(log_format: str, log_level: str = "info") -> Logger:
    """Configures the process's logging and returns its logger. The arguments are those of --log-level and its format.

    Lines that can't be written are lost; the next one that can be says how many."""
    processors: list[structlog.typing.Processor] = []
    if log_format == "json":
        renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
        lines = Lines(sys.stderr, _json_note)
    else:
        # Any field may hold text from a client, which must not move the cursor or start a new line.
        processors.append(_escape)
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=32)
        lines = Lines(sys.stderr, "({})".format)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *processors,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(log_level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    logging.lastResort = _OfLibraries(logging.WARNING)
    return structlog.get_logger()  # type: ignore[no-any-return]


def print_error(line: str) -> None:
    """Prints a command's last words to standard error, if they can be written: they don't change its exit status."""
    Lines(sys.stderr, str).msg(line)


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _json_note(text: str) -> str:
    return json.dumps({"event": text, "level": "warning", "timestamp": datetime.now(UTC).isoformat()})
