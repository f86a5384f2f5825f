"""The reply that the kernel writes in the same pass; and a gradient that its worker changes while the pass runs."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.layout import Vector
from gem_server.rules import make_rule
from gem_server.rules.base import MAX_MAGNITUDE, largest
from gem_server.rules.fused import BLOCK
from kit.core import bits
from rules.oracle import Oracle
from rules.passes import Run

RULES = {
    "after": make_rule("gem"),
    "paper": make_rule("gem", snapshot="paper"),
    "reference": make_rule("gem", snapshot="reference", epsilon=1e-12),
    "downpour": make_rule("downpour"),
    "adaptive": make_rule("adaptive"),
}
SIZE = 2 * BLOCK + 37
BAD = [np.nan, -np.nan, np.inf, -np.inf, 1e38, -1e38]


def values(seed: int, size: int = SIZE) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


# -- the answer


@pytest.mark.parametrize("name", RULES)
def test_a_pull_fills_the_answer(name: str) -> None:
    theta = values(0)
    assert bits(Run.of(RULES[name], theta, answered=True).workers[0]["answer"]) == bits(theta)


@pytest.mark.parametrize("name", RULES)
def test_the_answer_changes_nothing_else(name: str) -> None:
    one, other = Run.of(RULES[name], values(0), answered=True), Run.of(RULES[name], values(0))
    (answered,), (plain,) = one.workers, other.workers
    for number in range(4):
        for run in (one, other):
            run.commit(values(number + 1), staleness=number)
        assert bits(one.theta) == bits(other.theta)
        assert all(bits(answered[buffer]) == bits(plain[buffer]) for buffer in plain)
        assert bits(plain[one.rule.reply_buffer]) == bits(answered["answer"])


# -- a gradient that changes after it was checked


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_number_or_too_large_counts_as_zero(name: str, bad: float) -> None:
    """Bit for bit what the equations make of a zero there, and the same as ever everywhere else."""
    rule, theta = RULES[name], values(0, 300)
    settings = {"mu": 0.9, "snapshot": name, "epsilon": rule.epsilon} if rule.name == "gem" else {}  # type: ignore[attr-defined]
    oracle = Oracle(rule.name, theta, ["ann"], eta=0.05, **settings)
    oracle.pull("ann")
    run = Run.of(rule, theta)
    for number in range(3):
        gradient = values(number + 1, 300)
        gradient[::7] = bad
        run.commit(gradient)
        oracle.workers["ann"].base_version = oracle.version  # a lone worker's τ is 0 here
        oracle.commit("ann", np.where(np.abs(gradient) < 1e30, gradient, np.float32(0)))
        assert bits(run.theta) == bits(oracle.theta)
        assert np.isfinite(run.theta).all()
        if "moment" in run.workers[0]:
            assert bits(run.workers[0]["moment"]) == bits(oracle.workers["ann"].moment)


@pytest.mark.parametrize("eta", [1e-30, 0.05, 1.0, 1e3])
def test_the_largest_gradient_taken_is_that_of_the_check_at_the_door(eta: float) -> None:
    rule = make_rule("downpour", learning_rate=eta)
    limit = largest(eta)
    assert limit == np.float32(min(MAX_MAGNITUDE / eta, MAX_MAGNITUDE))
    run = Run.of(rule, np.zeros(2, np.float32))
    run.commit(np.array([limit, np.nextafter(limit, np.float32(np.inf))], np.float32))
    assert run.theta.tolist() == [-np.float32(eta) * limit, 0]


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_only_read(name: str) -> None:
    gradient = values(1)
    Run.of(RULES[name], values(0), answered=True).commit(gradient)
    assert bits(gradient) == bits(values(1))
