"""The bound on gradients' norms: relative to the run's own history, robust, and silent until there is one."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.errors import NormOutOfBounds
from gem_server.core.norm_bound import MIN_NORMS, WINDOW, GradientNorm, NormHistory


def history(norms: list[float], ratio: float = 10.0) -> NormHistory:
    """A history in which all of these were accepted."""
    made = NormHistory(ratio)
    for norm in norms:
        made.accepted(norm)
    return made


def refuses(past: NormHistory, norm: float) -> bool:
    try:
        past.judge(norm)
    except NormOutOfBounds:
        return True
    return False


# -- the judgement


def test_the_bound_itself_is_taken_and_what_is_beyond_is_refused() -> None:
    past = history([2.0] * MIN_NORMS)
    assert not refuses(past, 20.0)
    assert refuses(past, 20.01)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_judgement_has_no_unit(scale: float) -> None:
    dice = np.random.default_rng(5)
    norms = np.exp(dice.normal(size=WINDOW))
    judged = np.exp(4 * dice.normal(size=200))
    plain, scaled = history(norms.tolist()), history((scale * norms).tolist())
    verdicts = [refuses(plain, norm) for norm in judged]
    assert {True, False} == set(verdicts)
    assert [refuses(scaled, scale * norm) for norm in judged] == verdicts


def test_nothing_is_judged_before_there_is_a_history() -> None:
    past = NormHistory(10.0)
    for _ in range(MIN_NORMS):
        assert not refuses(past, 1e30)
        past.accepted(1.0)
    assert refuses(past, 1e30)


@pytest.mark.parametrize("poisoned", [1, 5, MIN_NORMS // 2 - 1])
def test_poisoned_commits_taken_early_do_not_move_the_bound_while_they_are_the_fewer(poisoned: int) -> None:
    past = history([1e6] * poisoned + [1.0] * (MIN_NORMS - poisoned))
    assert refuses(past, 10.5)
    assert not refuses(past, 9.5)


@pytest.mark.parametrize("step", [0.5, 0.93, 1.07, 2.0])
def test_a_run_whose_norms_fall_or_rise_steadily_is_never_refused(step: float) -> None:
    """By 1e30 and more in all, as long as no norm is far above those of its own time."""
    past = history([1.0] * MIN_NORMS, ratio=1e16)
    norm = 1.0
    for _ in range(100):
        norm *= step
        assert not refuses(past, norm)
        past.accepted(norm)


def test_a_norm_of_the_runs_past_is_refused_once_the_run_has_come_far_below_it() -> None:
    past = history([1.0] * WINDOW)
    assert not refuses(past, 1.0)
    for _ in range(WINDOW):
        past.accepted(0.01)
    assert refuses(past, 1.0)


def test_a_refused_norm_leaves_the_history_as_it_was() -> None:
    past = history([1.0] * MIN_NORMS)
    before = past.norms
    assert refuses(past, 1e6)
    assert past.norms == before


def test_zeros_are_taken_and_do_not_drag_the_bound_to_zero() -> None:
    past = history([1.0] * MIN_NORMS + [0.0] * WINDOW)
    assert not refuses(past, 0.0)
    assert not refuses(past, 5.0)


def test_without_a_ratio_nothing_is_ever_refused() -> None:
    past = history([1.0] * WINDOW, ratio=0.0)
    assert not past.bounded
    assert not refuses(past, 1e30)


@pytest.mark.parametrize("ratio", [1e-9, 0.99, -1.0])
def test_a_ratio_below_1_is_no_bound(ratio: float) -> None:
    with pytest.raises(ValueError, match="max_norm_ratio"):
        NormHistory(ratio)


def test_the_refusal_says_by_how_much_and_what_the_bound_is() -> None:
    with pytest.raises(NormOutOfBounds, match=r"1e\+06 times the median of the run's last 20 commits; the bound is 10 "):
        history([2.0] * MIN_NORMS).judge(2e6)


# -- the norm


@pytest.mark.parametrize("size", [0, 1, 7, 4096, 100_003])
def test_a_norm_in_pieces_is_the_norm_of_the_whole(size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    norm = GradientNorm()
    for piece in np.array_split(values, 5):
        norm.add(piece)
    assert norm.value == pytest.approx(np.linalg.norm(values.astype(np.float64)), rel=1e-12)


def test_a_norm_does_not_depend_on_the_order_of_its_pieces() -> None:
    """Several threads add them."""
    norms = []
    pieces = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    for order in (slice(None), slice(None, None, -1), np.random.default_rng(1).permutation(40)):
        norms.append(GradientNorm())
        for piece in pieces[order]:
            norms[-1].add(piece)
    assert norms[0].value == norms[1].value == norms[2].value


@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_a_norm_neither_overflows_nor_vanishes_where_float32_squares_would(value: float) -> None:
    norm = GradientNorm()
    norm.add(np.full(10_000, value, np.float32))
    assert norm.value == pytest.approx(100 * float(np.float32(value)), rel=1e-9)
