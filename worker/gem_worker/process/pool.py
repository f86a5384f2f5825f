"""Runs the workers of one process, one thread each, and stops them in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gem_worker.command import Stopped, ignore_signals
from gem_worker.process.stopping import Stopping
from gem_worker.process.worker_thread import WorkerThread

# Together less than the 20 seconds after which gem-train kills a process that got SIGTERM.
_STEP_SECONDS, _LEAVE_SECONDS = 5.0, 5.0


class WorkerPool:
    """One thread per worker. If a worker fails, the others continue.

    Args:
        workers: The workers, not started yet.
        stopping: Wakes the workers' sleeps when they are to stop.
    """

    def __init__(self, workers: list[WorkerThread], stopping: Stopping) -> None:
        self._stopping = stopping
        self._workers = workers
        # `run` waits for these, not for the threads: a join interrupted by a signal marks it as ended (CPython 3.11, 3.12).
        self._ended = [threading.Event() for _ in workers]
        pairs = zip(workers, self._ended, strict=True)
        self._threads = [_thread(worker.work, worker.name, ended) for worker, ended in pairs]

    @property
    def busy(self) -> bool:
        """Whether a thread still runs, because its computation or call could not be interrupted."""
        return not all(ended.is_set() for ended in self._ended)

    def run(self) -> bool:
        """Runs until all workers have ended; call it in the main thread. Returns whether SIGTERM or Ctrl-C stopped them."""
        try:
            for thread in self._threads:
                thread.start()
            for ended in self._ended:
                ended.wait()
        except Stopped:
            ignore_signals()
            self._stop()
            return True
        return False

    def _stop(self) -> None:
        """Lets the workers finish their step and leave; after `_STEP_SECONDS`, closes the sessions of those still busy."""
        self._stopping.begin()
        for thread, ended in zip(self._threads, self._ended, strict=True):
            if thread.ident is None:  # the signal came before it was started
                ended.set()
        _wait(self._ended, _STEP_SECONDS)
        leaving = []
        for worker, ended in zip(self._workers, self._ended, strict=True):
            if not ended.is_set():
                leaving.append(threading.Event())
                _thread(worker.break_off, f"{worker.name}-leaving", leaving[-1]).start()
        _wait([*leaving, *self._ended], _LEAVE_SECONDS)


def _thread(work: Callable[[], None], name: str, ended: threading.Event) -> threading.Thread:
    """A daemon thread that calls `work` and then sets `ended`."""

    def run() -> None:
        try:
            work()
        finally:
            ended.set()

    return threading.Thread(target=run, name=name, daemon=True)


def _wait(events: list[threading.Event], seconds: float) -> None:
    """Waits for all events, `seconds` at most in total."""
    deadline = time.monotonic() + seconds
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))
