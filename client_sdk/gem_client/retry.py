"""When to try again: exponential backoff with full jitter, for as long as the caller allows."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gem_api.errors import GemError, Overloaded, TransportError

log = logging.getLogger("gem_client")
T = TypeVar("T")
RETRYABLE = (TransportError, Overloaded)


@dataclass(frozen=True)
class Retry:
    """How long and how often to try again after an error that may pass.

    Attributes:
        give_up_after: Seconds without success after which the error is raised. A server that restarts is out of reach
            for a while; the default waits five minutes for it.
        first_pause: Upper bound of the first pause, in seconds; it doubles each time.
        longest_pause: What the bound stops doubling at.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
        uniform: A random number between two bounds.
    """

    give_up_after: float = 300.0
    first_pause: float = 0.1
    longest_pause: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def call(self, attempt: Callable[[], T], on_failure: Callable[[GemError, float], None] = lambda error, pause: None) -> T:
        """Returns what `attempt` returns, trying again while it raises an error that may pass.

        Args:
            attempt: Safe to repeat.
            on_failure: Told of each failure and the pause before the next try.

        Raises:
            TransportError, Overloaded: The last failure, when the time is up.
            GemError: Any other failure, at once.
        """
        began, bound = self.clock(), self.first_pause
        while True:
            try:
                return attempt()
            except RETRYABLE as error:
                pause = self.uniform(0, bound)
                if self.clock() - began + pause > self.give_up_after:
                    error.add_note(
                        f"gave up after {self.give_up_after:g} s; gem_client.Retry(give_up_after=...) sets another time"
                    )
                    raise
                on_failure(error, pause)
                self.sleep(pause)
                bound = min(2 * bound, self.longest_pause)


def logging_failures(who: str) -> Callable[[GemError, float], None]:
    """For `Retry.call`: logs a failure that is going to be tried again in full, and the same one again briefly."""
    last = ""

    def report(error: GemError, pause: float) -> None:
        nonlocal last
        same, last = str(error) == last, str(error)
        log.warning("%s: %s; trying again in %.1f s", who, "still the same" if same else error, pause)

    return report
