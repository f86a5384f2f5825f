"""Retries: exponential backoff with full jitter, for as long as the caller allows."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

from gem_api.errors import GemError, InvalidRequest, Overloaded, TransportError

log = logging.getLogger("gem_client")
T = TypeVar("T")
REMIND_SECONDS = 30.0  # between two log lines about errors of the same type
RETRYABLE = (TransportError, Overloaded)


@dataclass(frozen=True)
class Retry:
    """Limits for retrying a call after a temporary error: the server is unreachable or overloaded.

    Each pause is a random time between 0 and a bound, which doubles after each failure.

    Attributes:
        give_up_after: Seconds without success after which the error is raised. The default gives a server five minutes to
            restart.
        first_pause: The bound of the first pause, in seconds.
        longest_pause: The largest bound of a pause, in seconds.
        clock: Returns monotonic seconds. For tests, as the next two are.
        sleep: Waits for a number of seconds.
        uniform: Returns a random number between two bounds.

    Raises:
        InvalidRequest: A number of seconds is negative or NaN, or a pause is infinite.
    """

    give_up_after: float = 300.0
    first_pause: float = 0.1
    longest_pause: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def __post_init__(self) -> None:
        for name in ("give_up_after", "first_pause", "longest_pause"):
            seconds = getattr(self, name)
            endless = seconds == math.inf and name != "give_up_after"
            if endless or not (isinstance(seconds, Real) and float(seconds) >= 0):
                raise InvalidRequest(f"{name} is a number of seconds, at least 0, not {seconds!r}")

    def call(
        self,
        attempt: Callable[[], T],
        on_failure: Callable[[GemError, float], None] = lambda error, left: None,
        temporary: tuple[type[GemError], ...] = RETRYABLE,
    ) -> T:
        """Calls `attempt` until it succeeds, and returns its result.

        Args:
            attempt: The call to make. It must be safe to repeat.
            on_failure: Called after each temporary error, with the error and the seconds until this gives up.
            temporary: The errors after which to try again.

        Raises:
            TransportError, Overloaded: Or what else is `temporary`: the last temporary error, after `give_up_after` seconds.
            GemError: Any other error, at once.
        """
        began, bound = self.clock(), self.first_pause
        while True:
            try:
                return attempt()
            except temporary as error:
                pause = self.uniform(0, bound)
                left = began + self.give_up_after - self.clock()
                if pause > left:
                    error.add_note(
                        f"gave up after {self.give_up_after:g} s; set another limit with gem_client.Retry(give_up_after=...)"
                    )
                    raise
                on_failure(error, left)
                self.sleep(pause)
                bound = min(2 * bound, self.longest_pause)


def logging_failures(who: str, clock: Callable[[], float] = time.monotonic) -> Callable[[GemError, float], None]:
    """Returns a callback for `Retry.call` that logs the failures, each type of error at most once in `REMIND_SECONDS`. Several
    threads may share it."""
    logged: dict[type[GemError], float] = {}  # when

    def report(error: GemError, left: float) -> None:
        now = clock()
        if now - logged.get(type(error), -math.inf) >= REMIND_SECONDS:
            logged[type(error)] = now
            log.warning("%s: %s; trying again, %s", who, error, "for ever" if left == math.inf else f"for {left:.0f} s more")

    return report
