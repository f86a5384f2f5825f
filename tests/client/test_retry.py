"""When a failed call is tried again, on a clock that only moves in the pauses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gem_client import (
    CheckpointFailed,
    DeadlineExceeded,
    Draining,
    GemError,
    IncompleteTransfer,
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    NonFiniteGradient,
    NotInitialized,
    Overloaded,
    Retry,
    SequenceGap,
    ServerUnavailable,
)
from gem_client.retry import FailureLog


class Time:
    """Seconds that pass only in sleeps; each pause is as long as it may be, or the given share of that."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 0.0
        self.bounds: list[tuple[float, float]] = []
        self.pauses: list[float] = []
        self._share = share

    def retry(self, **settings: Any) -> Retry:
        return Retry(clock=lambda: self.now, sleep=self._sleep, uniform=self._uniform, **settings)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def _uniform(self, low: float, high: float) -> float:
        self.bounds.append((low, high))
        return low + self._share * (high - low)


def failing(*errors: GemError, then: str = "done") -> Callable[[], str]:
    """An attempt that raises each of these in turn, then succeeds."""
    left: Iterator[GemError] = iter(errors)

    def attempt() -> str:
        error = next(left, None)
        if error is not None:
            raise error
        return then

    return attempt


def always(error: Exception) -> Callable[[], str]:
    """An attempt that never succeeds."""

    def attempt() -> str:
        raise error

    return attempt


@pytest.mark.parametrize("kind", [ServerUnavailable, DeadlineExceeded, Draining, Overloaded])
def test_an_error_that_may_pass_is_tried_again(kind: type[GemError]) -> None:
    """Each call begins with the first pause."""
    time = Time()
    retry = time.retry(give_up_after=5.0, first_pause=1.0)
    for _ in range(2):
        assert retry.call(failing(kind("a"), kind("b"))) == "done"
    assert time.pauses == [1, 2, 1, 2]


@pytest.mark.parametrize(
    "error",
    [
        LeaseEnded("a"), LayoutMismatch(), IncompleteTransfer(), NonFiniteGradient(), SequenceGap(), InvalidRequest(),
        NotInitialized(), CheckpointFailed(), ZeroDivisionError(),
    ],
)  # fmt: skip
def test_any_other_error_is_raised_at_once(error: Exception) -> None:
    time = Time()
    with pytest.raises(type(error)):
        time.retry().call(always(error))
    assert time.pauses == []


def test_the_bound_of_the_pause_doubles_up_to_the_longest() -> None:
    time = Time()
    time.retry(first_pause=0.1, longest_pause=1.0).call(failing(*[ServerUnavailable("down")] * 6))
    assert time.bounds == [(0, 0.1), (0, 0.2), (0, 0.4), (0, 0.8), (0, 1.0), (0, 1.0)]


def test_the_pause_is_drawn_from_the_whole_range_below_its_bound() -> None:
    time = Time(share=0.25)
    time.retry(first_pause=1.0).call(failing(*[ServerUnavailable("down")] * 3))
    assert time.pauses == [0.25, 0.5, 1.0]


def test_it_gives_up_with_the_last_error_before_the_time_is_over() -> None:
    time = Time()
    errors = [ServerUnavailable(str(number)) for number in range(100)]
    with pytest.raises(ServerUnavailable) as caught:
        time.retry(give_up_after=10.0, first_pause=1.0, longest_pause=4.0).call(failing(*errors))
    assert time.pauses == [1, 2, 4]
    assert caught.value is errors[3]
    assert time.now <= 10


def test_the_time_that_the_attempts_take_counts() -> None:
    time = Time()

    def slow() -> str:
        time.now += 6.0
        raise DeadlineExceeded("too slow")

    with pytest.raises(DeadlineExceeded):
        time.retry(give_up_after=10.0).call(slow)
    assert len(time.pauses) == 1


def test_each_failure_is_reported_with_the_time_left_but_the_last_is_raised() -> None:
    time, told = Time(), []
    with pytest.raises(ServerUnavailable):
        time.retry(give_up_after=3.5, first_pause=1.0).call(
            always(ServerUnavailable("down")), lambda error, left: told.append((str(error), left))
        )
    assert told == [("down", 3.5), ("down", 2.5)]


def test_while_it_lasts_an_error_is_logged_every_half_minute_and_one_of_another_type_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = Time()
    failures = FailureLog("ann", lambda: time.now)
    report = failures.failed
    with caplog.at_level(logging.WARNING, "gem_client"), pytest.raises(Overloaded):
        time.retry(give_up_after=80.0, first_pause=5.0).call(always(Overloaded("full")), report)
    assert len(time.pauses) == 16
    assert caplog.messages == [f"ann: full; trying again, for {left} s more" for left in (80, 50, 20)]
    report(Draining("ends"), math.inf)
    report(Overloaded("still full"), 1.0)
    assert caplog.messages[3:] == ["ann: ends; trying again, for ever"]


def test_that_the_server_answers_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    failures = FailureLog("ann", lambda: time.now)
    retry = time.retry(first_pause=2.0)
    for errors in (2, 0, 0):
        retry.call(failing(*[ServerUnavailable("down")] * errors), failures.failed, failures.recovered)
    assert caplog.messages[1:] == [f"ann: the server answers again, after {sum(time.pauses):.1f} s"]
