"""One of the workers of a process, from its session to its exit status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from gem_api.process import logs
from gem_client import GemError, InvalidRequest, LayoutMismatch, NonFiniteGradient, Quarantined, Session

from gem_worker.command import EXIT_DIVERGED, EXIT_FAILED, EXIT_QUARANTINED, EXIT_WRONG_USE, Stopped
from gem_worker.process.stopping import Stopping

_SEVERITY = (0, EXIT_DIVERGED, EXIT_QUARANTINED, EXIT_WRONG_USE, EXIT_FAILED)


@dataclass
class LogicalWorker:
    """A worker with a session of its own.

    Attributes:
        name: Its name in the run.
        connect: Opens its session.
        train: Trains with that session until the run is done; returns the commits made.
        stopping: When it begins, whatever goes wrong is no failure.
        log: For what becomes of it.
        status: Its exit status, once it has ended.
        ended: Whether its life is over, with a status or without.
    """

    name: str
    connect: Callable[[], Session]
    train: Callable[[Session], int]
    stopping: Stopping
    log: logs.Logger
    status: int | None = None
    ended: bool = False
    _session: Session | None = field(default=None, init=False)

    def work(self) -> None:
        """The worker's whole life; raises nothing."""
        structlog.contextvars.bind_contextvars(worker=self.name)
        try:
            self.status = self._to_the_end()
        except Stopped:
            self.break_off()
            self.status = 0
            self.log.info("stopped; left the run")
        finally:
            self.ended = True

    def break_off(self) -> None:
        """Leaves the run at once, from any thread: its shards go back, and nobody waits for the commit under way."""
        if self._session is not None:
            self._session.__exit__(Stopped, None, None)

    def _to_the_end(self) -> int:
        try:
            with self.connect() as self._session:
                commits = self.train(self._session)
                shared_memory = self._session.shares_memory
        except Stopped:
            raise
        except BaseException as error:  # a task's sys.exit() too, which would end this thread without a word
            if self.stopping.begun:  # its session was taken from it
                raise Stopped from None
            return self._failed(error)
        self.log.info("done", commits=commits, shared_memory=shared_memory)
        return 0

    def _failed(self, error: BaseException) -> int:
        """Logs why; returns the exit status."""
        match error:
            case NonFiniteGradient():
                self.log.error("training diverged", why=str(error))
                return EXIT_DIVERGED
            case Quarantined():
                self.log.error("in quarantine: the server refused too many gradients of this worker", why=str(error))
                return EXIT_QUARANTINED
            case InvalidRequest() | LayoutMismatch():
                self.log.error("this worker does not fit the run", error=type(error).__name__, why=str(error))
                return EXIT_WRONG_USE
            case GemError():
                self.log.error("the run ended for this worker", error=type(error).__name__, why=str(error))
            case Exception():
                self.log.error("the task failed", exc_info=error)
            case _:
                self.log.error("the task ended its worker before the run was done", why=repr(error))
        return EXIT_FAILED


def worst(workers: list[LogicalWorker]) -> int:
    """The exit status of a process with these workers: a failure, which may pass when it is started again, counts most."""
    return max(map(_counted, workers), key=_SEVERITY.index, default=0)


def _counted(worker: LogicalWorker) -> int:
    """The worker's status; without one it has failed if it has ended, and else was not started, or could not be stopped."""
    if worker.status is None:
        return EXIT_FAILED if worker.ended else 0
    return worker.status
