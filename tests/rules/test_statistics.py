"""The statistics of π: bins and quantiles; and the check of received values."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_server.rules import PiStatistics, RuleInput, make_rule
from gem_server.rules.bins import bin_edges
from gem_server.rules.fused import BINS, BLOCK, all_within, quantile
from hypothesis import given
from hypothesis import strategies as st
from rules.oracle import bin_of, counted, histogram

PI_MAXIMA = [1e-3, 0.5, 1.0, 1.03, 3.999999, 4.0, 5.0, 1e3, 1e6]
OCTAVES = (BINS - 3) / 16  # how far below π_max the bins reach


def facts_for(pi: np.ndarray, pi_max: float = 5.0, layout: Layout | None = None) -> tuple[PiStatistics, np.ndarray]:
    """The facts of a commit whose π are those given (none above 8), and the π as float32 had them.

    With Δ = 1, s = θ and κ = 1, π is |m|; a moment of 2(π − 1) becomes π under a momentum of ½ (Eqs. 19, 24).
    """
    rule = make_rule("gem", learning_rate=1.0, momentum=0.5, pi_max=pi_max)
    theta = np.zeros(pi.size, np.float32)
    moment = (2 * (pi.astype(np.float64) - 1)).astype(np.float32)
    buffers = {"moment": moment, "snapshot": theta.copy()}
    layout = layout or Layout.of({"w": (pi.size,)})
    facts = rule.apply(layout, theta, np.full(pi.size, -1, np.float32), buffers, RuleInput(0))
    assert facts is not None
    return facts, np.minimum(np.abs(moment), np.float32(pi_max))


def within_a_bin(value: float, exact: float, pi_max: float) -> bool:
    if exact == 0 or exact == np.float32(pi_max):
        return value == exact
    lowest = pi_max * 2.0**-OCTAVES  # everything below shares bin 1
    return bool(abs(value - exact) <= max(exact, lowest) / 16 or max(value, exact) <= lowest * 1.1)


# -- bins


@pytest.mark.parametrize("pi_max", PI_MAXIMA)
def test_bins_rise_from_zero_to_the_maximum_by_at_most_a_sixteenth(pi_max: float) -> None:
    """Powers of two are edges: the metrics' buckets end at them."""
    edges = bin_edges(pi_max)
    assert edges.shape == (BINS,)
    assert edges.dtype == np.float32
    assert (edges[0], edges[-1]) == (0, np.float32(pi_max))
    assert np.isfinite(edges).all()
    assert (np.diff(edges) >= 0).all()
    assert (np.diff(edges[1:-1]) > 0).all()
    exact = edges.astype(np.float64)
    assert (exact[3:] / exact[2:-1]).max() <= 1 + 1 / 16 + 1e-7
    powers = 2.0 ** np.arange(np.ceil(np.log2(edges[2])), np.floor(np.log2(edges[-2])) + 1)
    assert np.isin(powers.astype(np.float32), edges).all()
    middles = PiStatistics(np.ones(BINS, np.int64), edges, 0, np.zeros(0, np.float32), 0, 0).middles
    assert (middles[0], middles[-1]) == (0, np.float32(pi_max))
    assert ((middles[1:-1] >= exact[1:-1]) & (middles[1:-1] <= exact[2:])).all()


@given(st.lists(st.floats(0, 7.5, width=32), min_size=1, max_size=300))
def test_each_pi_is_counted_in_its_own_bin(pi: list[float]) -> None:
    facts, exact = facts_for(np.array(pi, np.float32))
    np.testing.assert_array_equal(facts.counts, histogram(exact, 5.0))


# -- tensors of which a sample is counted


SAMPLED = [BLOCK, BLOCK + 1, 4095, 4096, 5 * BLOCK - 1, 31 * BLOCK + 33, 65_535, 65_536, 100_003]


@pytest.mark.parametrize("size", SAMPLED)
def test_the_sample_is_of_the_elements_that_are_meant_and_of_no_others(size: int) -> None:
    pi = np.full(size, 3, np.float32)
    pi[counted(size)] = 1
    facts, _ = facts_for(pi)
    assert facts.counts[bin_of(1.0, 5.0)] == size
    assert facts.tensor_medians[0] == pytest.approx(1, rel=1 / 16)


@pytest.mark.parametrize("size", SAMPLED)
def test_counts_of_a_sample_are_stretched_to_the_tensors_size(size: int) -> None:
    pi = np.random.default_rng(size).uniform(0, 6, size).astype(np.float32)
    facts, exact = facts_for(pi)
    sample = counted(size)
    shares = histogram(exact[sample], 5.0) * (size / len(sample))
    assert facts.counts.sum() == size
    assert (np.abs(facts.counts - shares) <= 1).all()
    assert (facts.counts[shares == 0] == 0).all()


def test_every_column_of_a_matrix_is_met_sooner_or_later() -> None:
    """Rows as long as a block are the hardest case: a sample at a fixed place would see the same columns for ever."""
    for column in range(0, BLOCK, 8):
        pi = np.full((64, BLOCK), 3, np.float32)
        pi[:, column : column + 8] = 1
        facts, _ = facts_for(pi.ravel())
        assert facts.counts[bin_of(1.0, 5.0)] == pi.size // (BLOCK // 8)


def test_small_tensors_are_exact_beside_large_ones() -> None:
    """A sampled tensor's counts neither spill into the next tensor's nor take its place."""
    layout = Layout.of({"large": (70_000,), "small": (2000,), "empty": (0,), "scalar": ()})
    facts, _ = facts_for(np.repeat(np.array([0, 2, 5], np.float32), [70_000, 2000, 1]), layout=layout)
    assert facts.counts[[0, bin_of(2.0, 5.0), -1]].tolist() == [70_000, 2000, 1]
    assert facts.tensor_medians[[0, 2, 3]].tolist() == [0, 0, 5]
    assert facts.tensor_medians[1] == pytest.approx(2, rel=1 / 16)


@pytest.mark.parametrize("size", [3, BLOCK - 1, 31 * BLOCK + 33])
def test_elements_without_a_step_are_not_counted(size: int) -> None:
    """They have no π: with a moment it would be π_max, without one 0, and either would shift the median."""
    rule = make_rule("gem", learning_rate=1.0, momentum=0.5)
    gradient = np.full(size, -1, np.float32)
    gradient[::3] = 0
    moment = np.full(size, 2, np.float32)  # π = 2 at Δ = 1
    buffers = {"moment": moment, "snapshot": np.zeros(size, np.float32)}
    facts = rule.apply(Layout.of({"w": (size,)}), np.zeros(size, np.float32), gradient, buffers, RuleInput(0))
    assert facts is not None
    assert facts.counts[bin_of(2.0, 5.0)] == facts.counts.sum()
    assert facts.counts.sum() == pytest.approx(np.count_nonzero(gradient), rel=0.02)
    assert (facts.zero_ratio, facts.max_ratio) == (0, 0)
    assert facts.median == facts.tensor_medians[0] == pytest.approx(2, rel=1 / 16)


def test_a_commit_without_any_step_has_zeros_for_facts() -> None:
    rule = make_rule("gem")
    buffers = {"moment": np.ones(5, np.float32), "snapshot": np.zeros(5, np.float32)}
    facts = rule.apply(Layout.of({"w": (5,)}), np.zeros(5, np.float32), np.zeros(5, np.float32), buffers, RuleInput(0))
    assert facts is not None
    assert (facts.counts.sum(), facts.median, facts.mean, facts.zero_ratio, facts.max_ratio) == (0, 0, 0, 0, 0)


# -- quantiles


@given(st.lists(st.floats(0, 7.5, width=32), min_size=1, max_size=300), st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 1.0]))
def test_a_quantile_is_within_a_bin_of_the_exact_one(pi: list[float], share: float) -> None:
    facts, exact = facts_for(np.array(pi, np.float32))
    value = float(quantile(facts.counts, facts.edges, share))
    assert within_a_bin(value, float(np.quantile(exact, share, method="inverted_cdf")), 5.0)


def test_nothing_counted_has_a_quantile_of_zero() -> None:
    assert quantile(np.zeros(BINS, np.int64), bin_edges(5.0), 0.5) == 0


# -- what comes in


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 2.0000002, -3.0])
@pytest.mark.parametrize("size", [1, 3, 16, 1000, 5000])
def test_one_value_out_of_the_limit_is_seen_wherever_it_stands(bad: float, size: int) -> None:
    for place in {0, size // 2, size - 1}:
        values = np.zeros(size, np.float32)
        values[place] = bad
        assert not all_within(values, np.float32(2))


def test_the_limit_itself_is_within() -> None:
    assert all_within(np.array([2, -2, 0, -0.0, 1e-45], np.float32), np.float32(2))
    assert all_within(np.zeros(0, np.float32), np.float32(2))
