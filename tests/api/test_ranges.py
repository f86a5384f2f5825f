"""How θ is cut into ranges."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gem_api.errors import InvalidRequest
from gem_api.ranges import UNIT, WHOLE, Range, all_bounds
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 300), st.integers(0, 1 << 30))
def test_ranges_cover_the_model_without_gap_or_overlap(count: int, more: int) -> None:
    parameters = count * UNIT + more
    bounds = all_bounds(parameters, count)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == parameters
    assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
    assert all(begin % UNIT == 0 and begin < end for begin, end in bounds)
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) < 2 * UNIT + count


@pytest.mark.parametrize("parameters", [1, 4095, 8191])
def test_a_model_that_is_too_small_for_its_servers_is_refused(parameters: int) -> None:
    assert WHOLE.bounds(parameters) == (0, parameters)
    with pytest.raises(InvalidRequest, match="too small for 2 servers"):
        Range(1, 2).bounds(parameters)


def test_a_range_is_read_and_written_alike() -> None:
    assert str(Range.parse("2/3")) == "2/3"
    assert [Range.parse(text).leads for text in ("0/1", "0/3", "1/3")] == [True, True, False]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "0/0", "0/1001", "1/2/3", "١/٢", "1 /2"])
def test_what_is_no_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a range"):
        Range.parse(text)
