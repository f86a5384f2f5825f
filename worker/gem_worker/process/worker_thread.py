"""One worker of a process: opens a session, trains, ends with an exit status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from gem_api.process import logs
from gem_client import GemError, InvalidRequest, LayoutMismatch, NonFiniteGradient, Quarantined, Session

from gem_worker.command import EXIT_DIVERGED, EXIT_FAILED, EXIT_QUARANTINED, EXIT_WRONG_USE, STOPPED, Stopped
from gem_worker.process.stopping import Stopping
from gem_worker.tasks import TaskError

_SEVERITY = (0, STOPPED, EXIT_DIVERGED, EXIT_QUARANTINED, EXIT_WRONG_USE, EXIT_FAILED)


@dataclass
class WorkerThread:
    """A worker with its own session.

    Attributes:
        name: The worker's name in the run.
        connect: Opens the worker's session.
        train: Trains with that session until the run is done; returns the number of commits.
        stopping: Once it has begun, errors no longer count as failures.
        log: Receives one line on how the worker ended.
        status: The exit status, or STOPPED; None before the end, or if `work` was aborted.
        ended: Whether `work` has returned.
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
        """Connects, trains and leaves the run; sets `status` and raises nothing."""
        structlog.contextvars.bind_contextvars(worker=self.name)
        try:
            self.status = self._train_to_end()
        except Stopped:
            self.break_off()
            self.status = STOPPED
            self.log.info("stopped; left the run")
        finally:
            self.ended = True

    @property
    def stalled(self) -> bool:
        """Whether the server has ended the worker's lease because it no longer trains."""
        return not self.ended and self._session is not None and self._session.stalled

    def break_off(self) -> None:
        """Leaves the run at once and returns the shards, without waiting for a commit in progress. Thread-safe."""
        if self._session is not None:
            self._session.__exit__(Stopped, None, None)

    def _train_to_end(self) -> int:
        try:
            with self.connect() as self._session:
                commits = self.train(self._session)
                shared_memory = self._session.shares_memory
        except Stopped:
            raise
        except BaseException as error:  # also a task's sys.exit(), which would end this thread silently
            if self.stopping.begun:  # `break_off` closed the session
                raise Stopped from None
            return self._failed(error)
        self.log.info("done", commits=commits, shared_memory=shared_memory)
        return 0

    def _failed(self, error: BaseException) -> int:
        """Logs the cause; returns the exit status."""
        match error:
            case NonFiniteGradient():
                self.log.error("training diverged", why=str(error))
                return EXIT_DIVERGED
            case Quarantined():
                self.log.error("quarantined: the server rejected too many gradients of this worker", why=str(error))
                return EXIT_QUARANTINED
            case InvalidRequest() | LayoutMismatch() | TaskError():
                self.log.error("this worker does not fit the run", error=type(error).__name__, why=str(error))
                return EXIT_WRONG_USE
            case GemError():
                self.log.error("the worker left the run after an error", error=type(error).__name__, why=str(error))
            case RuntimeError() if "out of memory" in str(error):  # the device's
                self.log.error(
                    "the device is out of memory: start the run with a smaller --batch-size, put fewer workers on each GPU, "
                    "or accumulate gradients in a loop of your own (batches_per_step)",
                    why=str(error).splitlines()[0],
                )
            case Exception():
                self.log.error("the task failed", exc_info=error)
            case _:
                self.log.error("the task exited before the run was done", why=repr(error))
        return EXIT_FAILED


def worst(workers: list[WorkerThread]) -> int:
    """The exit status of a process: the worst of its workers'. A failure counts most, because a restart may cure it."""
    return max(map(_final_status, workers), key=_SEVERITY.index, default=0)


def _final_status(worker: WorkerThread) -> int:
    """The worker's status. Without one: failed if `work` has ended, else stopped (before it began, or not in time)."""
    if worker.status is None:
        return EXIT_FAILED if worker.ended else STOPPED
    return worker.status
