"""The event loop, which shares the right to decide with the lane's threads.

Everything that the server decides is decided by one thread at a time: the one that holds the loop's lock. The loop's own thread
holds it while it runs callbacks, and lends it to others while it waits for input. So the code of the servicers, which runs on
the loop, needs no lock; a thread of the lane takes it for as long as it calls the core.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")


class Lent:
    """A context in which the thread that holds the lock lends it to others."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self._lock.acquire()


class _LendingSelector(selectors.DefaultSelector):
    """Lends the lock to other threads while it waits."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self._lent = Lent(lock)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        with self._lent:
            return super().select(timeout)


class DecidingLoop(asyncio.SelectorEventLoop):
    """An event loop whose thread holds `lock` whenever it does not wait.

    A thread that holds the lock may use whatever belongs to the loop, as if it ran there. What it schedules wakes the loop,
    which may be waiting for input.
    """

    _owner = 0  # the thread that runs it

    def __init__(self) -> None:
        self.lock = threading.Lock()
        super().__init__(_LendingSelector(self.lock))

    def run_forever(self) -> None:
        self._owner = threading.get_ident()
        with self.lock:
            super().run_forever()

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        if threading.get_ident() != self._owner:
            self.wake()
        return handle

    def wake(self) -> None:
        """Makes the loop look at what is scheduled, from any thread."""
        self.call_soon_threadsafe(_nothing)


def _nothing() -> None: ...


def running_loop() -> DecidingLoop:
    """The loop that this code runs on. Raises RuntimeError if it is another kind."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, DecidingLoop):
        raise RuntimeError("a server runs on a DecidingLoop: asyncio.Runner(loop_factory=DecidingLoop)")
    return loop
