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
        on_recovery: Callable[[], None] = lambda: None,
        temporary: tuple[type[GemError], ...] = RETRYABLE,
    ) -> T:
        """Calls `attempt` until it succeeds, and returns its result.

        Args:
            attempt: The call to make. It must be safe to repeat.
            on_failure: Called after each temporary error, with the error and the seconds until this gives up.
            on_recovery: Called before this returns, if there was a temporary error.
            temporary: The errors after which to try again.

        Raises:
            TransportError, Overloaded: Or what else is `temporary`: the last temporary error, after `give_up_after` seconds.
            GemError: Any other error, at once.
        """
        began, bound, failed = self.clock(), self.first_pause, False
        while True:
            try:
                result = attempt()
                if failed:
                    on_recovery()
                return result
            except temporary as error:
                failed = True
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


class FailureLog:
    """Logs the failures of calls, each type of error at most once in `REMIND_SECONDS`, and then that the server answers again.
    Several threads may share it.

    Args:
        who: The worker's name.
        clock: Returns monotonic seconds.
    """

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._who, self._clock = who, clock
        self._logged: dict[type[GemError], float] = {}  # when
        self._since: float | None = None  # when the first of the failures was, that no success has followed

    def failed(self, error: GemError, left: float) -> None:
        """A call has failed; it is tried again for `left` seconds."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._logged.get(type(error), -math.inf) >= REMIND_SECONDS:
            self._logged[type(error)] = now
            until = "for ever" if left == math.inf else f"for {left:.0f} s more"
            log.warning("%s: %s; trying again, %s", self._who, error, until)

    def recovered(self) -> None:
        """A call has succeeded after failures."""
        since, self._since = self._since, None
        if since is not None:
            log.warning("%s: the server answers again, after %.1f s", self._who, self._clock() - since)
