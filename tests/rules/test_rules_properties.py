"""Properties of the update rules that hold for any gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gem_api.layout import Layout, Vector
from gem_server.core.central_variable import require_finite
from gem_server.rules import RULES, RuleInput, UpdateRule, make_rule
from gem_server.rules.fused import BINS, BLOCK
from gem_server.rules.proxies import PROXIES
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kit.core import bits
from rules.passes import Run

EPS = float(np.finfo(np.float32).eps)
CONVENTIONS = ["after", "paper", "reference"]
SIZES = st.sampled_from([1, 2, 9, 130])


def vector(values: Sequence[object]) -> Vector:
    return np.array(values, np.float32)


def values(size: int, most: float = 1e3) -> st.SearchStrategy[Vector]:
    """float32, shape (size,): zeros, denormals and everything up to ±most."""
    limit = float(np.float32(most)) if float(np.float32(most)) <= most else float(np.nextafter(np.float32(most), np.float32(0)))
    return arrays(np.float32, size, elements=st.floats(-limit, limit, width=32))


def assert_no_nan(run: Run) -> None:
    assert not np.isnan(run.theta).any()
    for buffers in run.workers:
        for name, buffer in buffers.items():
            assert not np.isnan(buffer).any(), name


@st.composite
def runs(draw: st.DrawFn, *, most: float = 1e3, eta: float = 0.05) -> tuple[Run, list[tuple[int, Vector]]]:
    """A gem run of two workers in any convention, and a few commits for it."""
    size = draw(SIZES)
    chosen: dict[str, Any] = {
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.9, 0.999])),
        "kappa": draw(st.sampled_from([0.1, 1.0, 30.0])),
        "pi_max": draw(st.sampled_from([1e-3, 1.0, 5.0, 1e6])),
        "snapshot": draw(st.sampled_from(CONVENTIONS)),
    }
    rule = make_rule("gem", learning_rate=eta, **chosen)
    run = Run.of(rule, draw(values(size)), workers=2)
    commits = draw(st.lists(st.tuples(st.integers(0, 1), values(size, most)), min_size=1, max_size=6))
    return run, commits


# -- bounds


@settings(max_examples=50)
@given(runs())
def test_pi_lies_between_zero_and_its_maximum(case: tuple[Run, list[tuple[int, Vector]]]) -> None:
    """By the facts, and by what θ does: it moves against the gradient, by no more than π_max·η·|g|."""
    run, commits = case
    pi_max = run.rule.pi_max  # type: ignore[attr-defined]
    for worker, gradient in commits:
        before = run.theta.copy()
        facts = run.commit(gradient, worker)
        assert facts is not None
        assert facts.counts.shape == (BINS,)
        assert (facts.counts >= 0).all()
        assert facts.counts.sum() == np.count_nonzero(np.float32(-0.05) * gradient)  # the tensors are counted in full
        assert 0 <= facts.median <= np.float32(pi_max)
        assert ((facts.tensor_medians >= 0) & (facts.tensor_medians <= np.float32(pi_max))).all()
        assert 0 <= facts.zero_ratio <= 1
        assert 0 <= facts.max_ratio <= 1
        move = run.theta.astype(np.float64) - before
        most = pi_max * 0.05 * np.abs(gradient.astype(np.float64))
        rounding = EPS * (np.abs(before) + np.abs(run.theta)) + 1e-44
        assert (np.abs(move) <= most * (1 + 8 * EPS) + rounding).all()
        assert (move * np.sign(gradient) <= rounding).all(), "θ moved along the gradient: π was negative"


@settings(max_examples=50)
@given(runs(), st.integers(0, 1))
def test_a_gradient_of_zeros_leaves_theta_as_it_is_bit_for_bit(case: tuple[Run, list[tuple[int, Vector]]], worker: int) -> None:
    run, commits = case
    for number, gradient in commits:
        run.commit(gradient, number)
    before = bits(run.theta)
    run.commit(np.zeros_like(run.theta), worker)
    assert bits(run.theta) == before


def test_where_the_arrays_lie_in_memory_changes_no_bit() -> None:
    """Vector instructions have a head and a tail that depend on alignment and length; the results must not."""
    random = np.random.default_rng(1)
    theta, gradient = random.normal(size=(2, BLOCK + 100)).astype(np.float32)
    rule = make_rule("gem")
    whole = Run.of(rule, theta)
    facts = whole.commit(gradient)
    parts = []
    for begin, end in ((0, 3), (3, 1000), (1000, BLOCK + 100)):
        part = Run.of(rule, theta[begin:end])
        part.commit(gradient[begin:end])
        parts.append(part.theta)
    assert bits(whole.theta) == bits(np.concatenate(parts))
    assert facts is not None


# -- the edges of float32


def test_by_reference_a_denominator_of_exactly_zero_is_clamped() -> None:
    """|Δ + ε| = 0 where Δ = −ε: κ|m| is positive, so π is infinite before the clip, and π_max after it."""
    epsilon = float(np.float32(2.0**-40))
    run = Run.of(make_rule("gem", learning_rate=1.0, epsilon=epsilon, snapshot="reference"), np.zeros(1, np.float32))
    facts = run.commit(vector([epsilon]))
    assert facts is not None
    assert facts.max_ratio == 1
    assert run.theta.tolist() == [-5 * epsilon]


# Every rule with every option that makes it another, and every proxy.
VARIANTS = {
    **dict.fromkeys(RULES, ""),
    **{f"gem {proxy}": f"proxy={proxy} proxy_rate=1000" for proxy in PROXIES},
    **{f"gem by {convention}": f"snapshot={convention}" for convention in CONVENTIONS[1:]},
    "dcasgd-c": "compensation=1000",
    "dcasgd-a": "compensation=1000 mean_square=0.95",
    "fedasync hinge": "staleness=hinge mixing=1",
    "fedbuff 1": "buffer_size=1 outer_rate=1000",
    "fedbuff 2": "buffer_size=2 outer_rate=1000",
    "diloco far": "outer_rate=1000 outer_momentum=0.9999999",
    "diloco delayed": "delay=3 eager=0.3 outer_rate=1000 outer_momentum=0.99",
}  # fmt: skip


def variant(name: str, **settings: object) -> UpdateRule:
    return make_rule(name.partition(" ")[0].partition("-")[0], VARIANTS[name], **settings)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("eta", [1e-3, 1e3])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_update_that_is_taken_in_makes_theta_a_nan_or_an_infinity(name: str, eta: float) -> None:
    """Two workers in turn, 200 updates of the largest size, of the smallest, of zeros, with signs at random, from a large θ."""
    rule = variant(name, learning_rate=eta, kappa=1e3, pi_max=1e6)
    random = np.random.default_rng(1)
    run = Run.of(rule, vector([1e30, -1e30, 0, 1e-30, 1]), workers=2)
    sizes = vector([rule.largest, rule.largest / 1e6, 1, 1e-38, 1e-45, 0])
    for _ in range(200):
        update = random.choice(sizes, run.theta.size) * random.choice(vector([-1, 1]), run.theta.size)
        require_finite(update, rule.largest, "gradient")
        run.commit(update, worker=int(random.integers(2)), staleness=int(random.integers(5)))
        assert np.isfinite(run.theta).all()
    assert_no_nan(run)
    assert not any(np.isnan(buffer).any() for buffer in run.shared.buffers.values())
    assert np.isfinite(list(run.shared.numbers.values())).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("staleness", [0, 1000])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_largest_updates_all_one_way_never_add_up_to_an_infinity(name: str, staleness: int) -> None:
    """Under the settings that move θ most, from the largest θ that there is: what is added there is lost in rounding."""
    rule = variant(name, learning_rate=1e3, momentum=0.9999999, kappa=1e3, pi_max=1e6)
    run = Run.of(rule, np.full(1, np.finfo(np.float32).max, np.float32))
    update = np.full(1, rule.largest if rule.kind == "delta" else -rule.largest, np.float32)
    for _ in range(500):
        run.commit(update, staleness=staleness)
        assert np.isfinite(run.theta).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_reply_may_wait_if_it_lies_as_far_from_a_later_theta(name: str) -> None:
    rule, random = variant(name), np.random.default_rng(1)
    run = Run.of(rule, random.normal(size=9).astype(np.float32), workers=2, answered=True)
    for worker in (0, 1, 0):
        run.commit(random.normal(size=9).astype(np.float32), worker)
    buffers = run.workers[0]
    before = [buffers[reply] - run.theta for reply in ("snapshot", "answer")]
    run.theta += 1  # by the others
    rule.release(run.theta, buffers, buffers["snapshot"] + 1, 1.0)
    after = [buffers[reply] - run.theta for reply in ("snapshot", "answer")]
    assert rule.replies_may_wait == np.allclose(before, after, atol=1e-6)


def test_a_rescaled_commit_moves_theta_by_at_most_a_hundred_times_its_delta() -> None:
    rule, layout, moves = make_rule("rescaled", learning_rate=1.0), Layout.of({"w": (1,)}), []
    for staleness in (0, 198, 199, 200, 10_000):
        theta, snapshot = np.zeros((2, 1), np.float32)
        rule.apply(layout, theta, np.ones(1, np.float32), {"snapshot": snapshot}, RuleInput(staleness, workers=2))
        moves.append(float(-theta[0]))
    assert moves == [0.5, 99.5, 100.0, 100.0, 100.0]


# -- hyper-parameters


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        # The pass computes in float32, which rounds the last one of both to 0 and to 1.
        *(("learning_rate", value, "learning rate") for value in (0.0, -0.1, 1001.0, np.nan, np.inf, 1e-60)),
        *(("momentum", value, "momentum") for value in (-0.1, 1.0, 1.5, np.nan, 1 - 1e-12)),
        *(("kappa", value, "kappa") for value in (0.0, -1.0, 1e4, np.nan)),
        *(("epsilon", value, "epsilon") for value in (0.0, 1e-31, 1.1, np.nan)),
        *(("pi_max", value, "pi-max") for value in (0.0, 1e-4, 1e7, np.nan, np.inf)),
        ("snapshot", "before", "snapshot"),
    ],
)
def test_a_hyper_parameter_out_of_its_range_is_refused_by_name(name: str, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_rule("gem", **{name: value})


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_refuses_a_learning_rate_of_zero(rule: str) -> None:
    with pytest.raises(ValueError, match="learning rate"):
        make_rule(rule, learning_rate=0.0)


def test_an_unknown_rule_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match=r"'sgd'.*gem, downpour, adaptive"):
        make_rule("sgd")
