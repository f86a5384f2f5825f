"""The estimate of the time that the experiments will still take."""

from __future__ import annotations

import pytest

from benchmarks.paper.estimate import FIRST_GUESS, START_SECONDS, Pace, duration, seconds_left
from benchmarks.paper.experiments import Experiment

PLAIN = Experiment("mnist", workers=10, steps=100)
SIMULATED = Experiment("mnist", workers=10, steps=100, step_seconds=0.5)


def test_before_anything_was_measured_there_is_a_guess() -> None:
    assert Pace().rate() == FIRST_GUESS


def test_the_rate_is_that_of_what_was_done_and_is_being_done() -> None:
    pace = Pace()
    pace.add(PLAIN, 1000, 5.0)
    assert pace.rate() == 200
    assert pace.rate(600, 15.0) == 80


def test_a_run_with_simulated_compute_time_says_nothing_about_the_machine() -> None:
    pace = Pace()
    pace.add(SIMULATED, 1000, 50.0)
    assert pace.rate() == FIRST_GUESS


def test_what_is_left_is_the_rest_of_the_present_and_all_of_the_later() -> None:
    assert seconds_left([], PLAIN, 400, rate=100) == 6
    assert seconds_left([PLAIN, PLAIN], PLAIN, 1000, rate=100) == 2 * (10 + START_SECONDS)
    assert seconds_left([], None, 0, rate=100) == 0


def test_simulated_time_passes_however_fast_the_machine_is() -> None:
    assert seconds_left([SIMULATED], None, 0, rate=1e6) == 50 + START_SECONDS
    assert seconds_left([], SIMULATED, 500, rate=1e6) == 25


def test_more_done_than_planned_leaves_nothing() -> None:
    assert seconds_left([], PLAIN, 1010, rate=100) == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7500, "2 h 05 min"), (-1, "0 s")]
)
def test_a_span_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
