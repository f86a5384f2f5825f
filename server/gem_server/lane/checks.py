"""Checks large gradients in shared memory on other threads than the lane's, which would keep all other lanes waiting."""

from __future__ import annotations

from asyncio import Future
from concurrent.futures import ThreadPoolExecutor

from gem_api.errors import NonFiniteGradient
from gem_api.layout import Vector

from gem_server.core.central_variable import Check
from gem_server.core.state_machine import Core
from gem_server.event_loop import DecidingLoop

PIECE = 1 << 20  # elements between two uses of Python's global lock, for which the threads would queue
PASSES = 4  # a part is this many times as large as one of the pass: per element, a check moves a tenth of its bytes


class Checks:
    """Checks one gradient after the other, each by all threads of the pass.

    Args:
        core: The state machine; its rule has the threads.
        loop: The event loop, which makes the futures that lanes wait for.
    """

    def __init__(self, core: Core, loop: DecidingLoop) -> None:
        self._threads = core.rule.threads  # a run's new rule gets the same: see `Core.settle`
        self._loop = loop
        self._thread = ThreadPoolExecutor(1, "check")

    def begin(self, gradient: Vector, check: Check) -> Future[str] | None:
        """Begins to check a gradient (float32, shape (P,)) that stays where it is. Several threads call `check`. Call this
        under the event loop's lock.

        Returns:
            Why the gradient is refused, in the end; empty if it is not. It is not raised: the future, the error and its
            traceback would hold each other, and with them the memory of a lease that has ended. None if the gradient is so
            small that the caller checks it sooner than it hands it over.
        """
        parts = self._threads.parts(gradient.size // PASSES)
        return None if parts == 1 else self._loop.run_in_executor(self._thread, self._check, gradient, check, parts)

    def _check(self, gradient: Vector, check: Check, parts: int) -> str:
        def work(part: int) -> None:
            for begin in range(part * PIECE, gradient.size, parts * PIECE):
                check(gradient[begin : begin + PIECE])

        try:
            self._threads.run(work, parts)
        except NonFiniteGradient as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Ends the thread, once no lane begins a check any longer."""
        self._thread.shutdown()
