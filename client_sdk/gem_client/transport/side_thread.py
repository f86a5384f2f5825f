"""A daemon thread that runs one task after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Queue: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class SideThread:
    """Like a ThreadPoolExecutor with one thread, but the thread is a daemon. The interpreter joins an executor's threads before
    it exits, so a call that is retried for minutes would keep the process alive.

    Args:
        name: The thread's name.
        lock: Held while the thread runs a task.
    """

    def __init__(self, name: str, lock: threading.RLock) -> None:
        self._name = name
        self._lock = lock
        self._queue: _Queue = SimpleQueue()
        self._started = False
        # The thread holds no reference to this object, so that it ends with a session that nobody closed.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Calls `work` in the thread, after the tasks submitted before."""
        future: Future[T] = Future()
        self._queue.put((future, partial(work, *arguments, **named)))
        if not self._started:
            self._started = True
            threading.Thread(target=_work, args=(self._queue, self._lock), name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Cancels the tasks that have not begun, and ends the thread after the present one. Does not wait."""
        with suppress(Empty):
            while True:
                if (submitted := self._queue.get_nowait()) is not None:
                    submitted[0].cancel()
        self._queue.put(None)


def _work(queue: _Queue, lock: threading.RLock) -> None:
    while (submitted := queue.get()) is not None:
        future, work = submitted
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_locked(lock, work))
            except BaseException as error:
                future.set_exception(error)
        del submitted, future, work  # which hold the session


def _locked(lock: threading.RLock, work: Callable[[], T]) -> T:
    with lock:
        return work()
