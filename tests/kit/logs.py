"""What a server in this process logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
from structlog.testing import capture_logs

Lines = list[MutableMapping[str, Any]]


@contextmanager
def captured(level: int = logging.WARNING) -> Iterator[Lines]:
    """The lines of this level and above, during a `with` block; nothing is written."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        with capture_logs() as lines:
            yield lines
    finally:
        structlog.configure(**before)
