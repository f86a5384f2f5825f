"""The shuffle: a permutation of any number of samples, any range of which can be computed by itself."""

from __future__ import annotations

import numpy as np
import pytest
from gem_server.core.shuffle import shuffled
from hypothesis import given
from hypothesis import strategies as st

KEYS = st.tuples(st.integers(0, 2**63), st.integers(0, 100), st.text(max_size=5))


@given(st.integers(1, 3000), KEYS)
def test_it_is_a_permutation_of_any_number_of_samples(count: int, key: tuple[int, int, str]) -> None:
    order = shuffled(0, count, count, *key)
    assert order.dtype == np.uint64
    assert sorted(order.tolist()) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097])
def test_it_is_a_permutation_around_powers_of_the_network(count: int) -> None:
    assert sorted(shuffled(0, count, count, 0, 0, "").tolist()) == list(range(count))


@given(st.integers(1, 3000), KEYS, st.data())
def test_a_range_alone_equals_the_slice(count: int, key: tuple[int, int, str], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    np.testing.assert_array_equal(shuffled(begin, end, count, *key), shuffled(0, count, count, *key)[begin:end])


def test_a_range_of_a_very_large_set_needs_no_memory_for_the_rest() -> None:
    count = 2**40 + 7
    indices = shuffled(count - 1000, count, count, 1, 0, "")
    assert len(set(indices.tolist())) == 1000
    assert (indices < count).all()


def test_the_order_of_a_known_key_never_changes() -> None:
    """A resumed run goes on in the order that it began in, whatever version of the server resumes it."""
    assert shuffled(0, 10, 10, 0, 0, "").tolist() == [1, 7, 0, 2, 5, 4, 3, 9, 8, 6]


def test_seed_epoch_and_group_each_give_another_order() -> None:
    keys = [(0, 0, ""), (1, 0, ""), (0, 1, ""), (0, 0, "ann"), (10, 0, ""), (1, 1, "")]
    orders = [tuple(shuffled(0, 200, 200, *key).tolist()) for key in keys]
    assert len(set(orders)) == len(keys)
    for order in orders:
        assert sum(place == sample for place, sample in enumerate(order)) < 10, "hardly shuffled"


def test_shuffling_is_even() -> None:
    """Over many epochs each sample comes first about as often as any other (chi-square at p < 10⁻⁶)."""
    firsts = np.bincount([int(shuffled(0, 1, 10, 0, epoch, "")[0]) for epoch in range(2000)], minlength=10)
    assert ((firsts - 200) ** 2 / 200).sum() < 45


def test_neighbours_are_torn_apart() -> None:
    """Of neighbours in the data set, about 2 in n stay neighbours in the order."""
    order = shuffled(0, 2000, 2000, 0, 0, "").astype(np.int64)
    assert (np.abs(np.diff(order)) == 1).sum() < 20
