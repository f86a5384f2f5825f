"""Starts the server's threads and background tasks. None of them ends in silence: whatever it raises is reported.

Work that somebody waits for needs none of this: `asyncio.to_thread`, an executor or a `TaskGroup` hand its errors on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from gem_api.process.logs import Logger


def new_thread(name: str, work: Callable[[], None], failed: Callable[[BaseException], None]) -> threading.Thread:
    """A thread that is not started yet. It calls `failed` with whatever `work` raises, MemoryError among it."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed(error)

    return threading.Thread(target=run, name=name, daemon=True)


def start_chore(name: str, work: Callable[[], Coroutine[Any, Any, None]], logger: Logger) -> asyncio.Task[None]:
    """Starts a background task, without which the server can't go on: logs what it raises, and raises that again."""

    async def run() -> None:
        try:
            await work()
        except Exception as error:
            logger.error(
                "a background task failed: the server stops",
                task=name,
                why=f"{type(error).__name__}: {error}",
                exc_info=not isinstance(error, OSError),
            )
            raise

    return asyncio.create_task(run(), name=name)
