"""The logical workers of one process, each in a thread of its own, and how they are stopped in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gem_worker.command import Stopped, ignore_signals
from gem_worker.process.stopping import Stopping
from gem_worker.process.worker_thread import LogicalWorker

# gem-train kills what has not ended 20 seconds after its SIGTERM.
_STEP_SECONDS, _LEAVE_SECONDS = 5.0, 5.0


class Crew:
    """The workers' threads. Those that fail end alone; the others go on.

    Args:
        workers: Not started yet.
        stopping: What their sleeps end with.
    """

    def __init__(self, workers: list[LogicalWorker], stopping: Stopping) -> None:
        self._stopping = stopping
        self._workers = workers
        # Waited for instead of the threads: a join that a signal breaks off takes the thread for ended (CPython 3.11, 3.12).
        self._ended = [threading.Event() for _ in workers]
        pairs = zip(workers, self._ended, strict=True)
        self._threads = [_thread(worker.work, worker.name, ended) for worker, ended in pairs]

    @property
    def busy(self) -> bool:
        """Whether a thread is still inside a computation, or a call, that could not be broken off."""
        return not all(ended.is_set() for ended in self._ended)

    def run(self) -> bool:
        """Until all have ended; the main thread's. Returns whether they were stopped, by SIGTERM or Ctrl-C."""
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
        """The workers leave at the end of the step that they are in; those with long steps are taken out meanwhile."""
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
    """A thread that does `work` and then sets `ended`."""

    def run() -> None:
        try:
            work()
        finally:
            ended.set()

    return threading.Thread(target=run, name=name, daemon=True)


def _wait(events: list[threading.Event], seconds: float) -> None:
    """Waits for all of them, all together so many seconds at most."""
    deadline = time.monotonic() + seconds
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))
