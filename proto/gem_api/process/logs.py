"""Structured logs on standard error, as text or JSON."""

from __future__ import annotations

import sys

import structlog

from gem_api.process.printable import printable

Logger = structlog.typing.FilteringBoundLogger
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


def configure(log_format: str, log_level: str = "info") -> Logger:
    """Configures the process's logging and returns its logger. `log_format` is one of FORMATS, `log_level` one of LEVELS."""
    processors: list[structlog.typing.Processor] = []
    if log_format == "json":
        renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    else:
        # Any field may hold text from a client, which must not move the cursor or start a new line.
        processors.append(_escape)
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=32)
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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    return structlog.get_logger()  # type: ignore[no-any-return]


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}
