"""Which gradient gives way if memory is short: a pure rule."""

from __future__ import annotations

import pytest
from gem_server.core.uploads import STALLED, Arrival, gives_way

CHUNK = 1 << 20
NBYTES = 16 * CHUNK


def arrival(name: str, began: float = 0.0, slow_since: float | None = None) -> Arrival:
    return Arrival(name, NBYTES, began, slow_since)


def test_a_gradient_that_grows_by_a_chunk_in_time_never_stalls() -> None:
    steady = arrival("steady")
    for number in range(1, 100):
        assert gives_way([steady], number * STALLED, reserve_taken=False) is None
        steady.grown(CHUNK, number * STALLED)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK // 3])
def test_a_gradient_that_grows_by_less_stalls(nbytes: int) -> None:
    slow = arrival("slow")
    for second in range(1, 60):
        slow.grown(nbytes if second % 10 == 0 else 0, float(second))
    assert gives_way([slow], 60.0, reserve_taken=False) is slow


def test_what_came_fast_before_does_not_help_later() -> None:
    one = arrival("all but the last chunk")
    one.grown(NBYTES - CHUNK, 1.0)
    assert gives_way([one], 1.0 + STALLED, reserve_taken=False) is None
    assert gives_way([one], 1.01 + STALLED, reserve_taken=False) is one


def test_a_gradient_that_stood_still_is_as_good_as_new_once_it_goes_on() -> None:
    one = arrival("resumed")
    one.grown(CHUNK, 1000.0)
    assert gives_way([one], 1000.0 + STALLED, reserve_taken=False) is None


def test_the_one_that_has_stalled_for_longest_gives_way() -> None:
    older, old, fresh = arrival("older"), arrival("old"), arrival("fresh", began=50.0, slow_since=52.0)
    old.grown(CHUNK, 5.0)
    for reserve_taken in (False, True):
        assert gives_way([fresh, old, older], 60.0, reserve_taken) is older


def test_if_none_has_stalled_the_last_that_became_slow_gives_way_but_only_for_the_kept_buffer() -> None:
    slow, known, fast = arrival("a", 0.0, 8.0), arrival("b", 5.0, 5.0), arrival("c", 9.0)
    together = arrival("d", 1.0, 8.0)
    assert gives_way([slow, known, fast], 10.0, reserve_taken=False) is None
    assert gives_way([known, slow, fast], 10.0, reserve_taken=True) is slow
    assert gives_way([together, slow], 10.0, True) is gives_way([slow, together], 10.0, True) is together
    assert gives_way([fast], 10.0, reserve_taken=True) is None
