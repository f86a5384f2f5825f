"""How many transfers have a turn at the same time: one more, or one less, is tried, kept if it helps, and else turned round."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from gem_server.intake.width import TURNS_BETWEEN_TRIALS, TURNS_PER_TRIAL, Width


def after(width: Width, turns: int, rate: Callable[[int], float]) -> list[int]:
    """The widths after each of so many turns; all together have this rate, in bytes a second, with that many."""
    widths = []
    for _ in range(turns):
        width.ended(width.now, width.now, width.now / rate(width.now))
        widths.append(width.now)
    return widths


def test_after_one_less_has_failed_one_more_is_tried() -> None:
    width = Width(now=4)
    tried = after(width, 4 * TURNS_BETWEEN_TRIALS, lambda now: 100.0 * min(now, 4))
    assert set(tried) == {3, 4, 5}
    assert tried.count(4) > 3 * TURNS_BETWEEN_TRIALS
    first, second = tried.index(5), tried.index(3)
    assert first < second
    assert 5 in tried[second:]


@pytest.mark.parametrize(("kept", "rate"), [(True, 116.0), (False, 114.0)])
def test_one_more_must_be_a_seventh_faster(kept: bool, rate: float) -> None:
    width = Width()
    after(width, 2 * TURNS_PER_TRIAL, lambda now: rate if now > 1 else 100.0)
    assert width.now == (2 if kept else 1)


@pytest.mark.parametrize(("kept", "rate"), [(True, 91.0), (False, 89.0)])
def test_one_less_may_be_a_tenth_slower(kept: bool, rate: float) -> None:
    width = Width(now=3, _step=-1)
    after(width, 2 * TURNS_PER_TRIAL, lambda now: rate if now < 3 else 100.0)
    assert width.now == (2 if kept else 3)


def test_after_a_try_that_failed_the_next_one_rests() -> None:
    width = Width(now=2)
    tried = after(width, 4 * TURNS_BETWEEN_TRIALS, lambda now: 100.0 if now == 2 else 1.0)
    changes = [at for at, (before, now) in enumerate(pairwise(tried)) if before == 2 != now]
    assert all(later - earlier >= TURNS_BETWEEN_TRIALS for earlier, later in pairwise(changes))
    assert len(changes) >= 3


def test_turns_that_say_nothing_of_the_width_are_not_counted() -> None:
    width = Width(now=2)
    for _ in range(10 * TURNS_BETWEEN_TRIALS):
        width.ended(1, 2, 0.01)  # begun under another width
        width.ended(2, 1, 0.01)  # fewer than might have been
        width.ended(2, 2, 0.0)  # no time passed
    assert width == Width(now=2, _rested=width._rested)


def test_no_fewer_than_the_least_are_tried() -> None:
    width = Width()
    width.set_minimum(3)
    assert width.now == 3
    assert min(after(width, 6 * TURNS_BETWEEN_TRIALS, lambda now: 100.0)) == 3
    assert min(after(Width(), 6 * TURNS_BETWEEN_TRIALS, lambda now: 100.0)) == 1
