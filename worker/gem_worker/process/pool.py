"""Runs the workers of one process, one thread each, and stops them in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from gem_worker.command import EXIT_FAILED, Stopped, ignore_signals
from gem_worker.process.stopping import Stopping
from gem_worker.process.worker_thread import WorkerThread

# Together less than the 20 seconds after which gem-train kills a process that got SIGTERM.
_STEP_SECONDS, _LEAVE_SECONDS = 5.0, 5.0
_SIGNAL_SECONDS = 0.5  # how late a signal may be noticed


class WorkerPool:
    """One thread per worker. If a worker fails, the others continue.

    Args:
        workers: The workers, not started yet.
        stopping: Wakes the workers' sleeps when they are to stop. If another thread begins it, `run` stops the workers.
    """

    def __init__(self, workers: list[WorkerThread], stopping: Stopping) -> None:
        self._stopping = stopping
        self._workers = workers
        # `run` looks at these, not at the threads: a join interrupted by a signal marks it as ended (CPython 3.11, 3.12).
        self._ended = [threading.Event() for _ in workers]
        self._one_ended: SimpleQueue[None] = SimpleQueue()
        pairs = zip(workers, self._ended, strict=True)
        self._threads = [_thread(worker.work, worker.name, ended, self._one_ended) for worker, ended in pairs]

    @property
    def busy(self) -> bool:
        """Whether a thread still runs, because its computation or call could not be interrupted."""
        return not all(ended.is_set() for ended in self._ended)

    def run(self) -> bool:
        """Runs until all workers have ended, or one is stalled: that one has failed then, and the others are stopped, so that
        whoever started this process can start it again. Returns whether they were stopped: by SIGTERM or Ctrl-C, if this is the
        main thread, or because `stopping` has begun."""
        try:
            for thread in self._threads:
                thread.start()
            while self.busy:
                self._wait_for_an_end()
                if self._stopping.begun:
                    raise Stopped
                if stalled := [worker for worker in self._workers if worker.stalled]:
                    self._stop()
                    for worker in stalled:
                        if not worker.ended:
                            worker.status = EXIT_FAILED
                    return False
        except Stopped:
            ignore_signals()
            self._stop()
            return True
        return False

    def _wait_for_an_end(self) -> None:
        """Waits until a worker ends, or briefly.

        Not without limit: a signal that another thread receives, or that comes just before the wait, does not interrupt it. And
        not for an Event: `Stopped`, raised while its lock is being taken, would leave the lock taken for ever.
        """
        with suppress(Empty):
            self._one_ended.get(timeout=_SIGNAL_SECONDS)

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
                _thread(worker.break_off, f"{worker.name}-leaving", leaving[-1], self._one_ended).start()
        _wait([*leaving, *self._ended], _LEAVE_SECONDS)


def _thread(work: Callable[[], None], name: str, ended: threading.Event, one_ended: SimpleQueue[None]) -> threading.Thread:
    """A daemon thread that calls `work`, then sets `ended` and puts an item into `one_ended`."""

    def run() -> None:
        try:
            work()
        finally:
            ended.set()
            one_ended.put(None)

    return threading.Thread(target=run, name=name, daemon=True)


def _wait(events: list[threading.Event], seconds: float) -> None:
    """Waits for all events, `seconds` at most in total."""
    deadline = time.monotonic() + seconds
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))
