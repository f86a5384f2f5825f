"""The compiled kernel of GEM equals the equations of `rules/specification.py`, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from gem_server.rules import make_rule
from gem_server.rules.fused import BLOCK
from gem_server.rules.specification import gem
from kit.core import bits
from rules.passes import Run, gradient

F = np.float32
SIZES = [1, BLOCK - 1, BLOCK, 3 * BLOCK + 37]
CASES = [*(("momentum", against, 1.0) for against in (1.0, 0.3, 0.0)), ("momentum", 1.0, 0.375), ("global", 1.0, 1.0)]
COMMITS = 12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("convention", ["after", "paper", "reference"])
@pytest.mark.parametrize(("proxy", "against", "share"), CASES)
def test_the_compiled_pass_equals_the_specification_bit_by_bit(
    proxy: str, against: float, share: float, convention: str, size: int
) -> None:
    """Two workers in turn, so that snapshots are stale. The proxies differ in whose moment a commit continues, and one of them
    counts shares of a batch."""
    rule = make_rule("gem", snapshot=convention, proxy=proxy, kappa=1.5, epsilon=1e-12, against=against)
    random = np.random.default_rng(size)
    run = Run.of(rule, random.normal(size=size).astype(F), workers=2)
    for version in range(COMMITS):
        update, buffers = gradient(random, size), run.workers[version % 2]
        drawn = f"moment_{(version * 2654435761 & 0xFFFFFFFF) * 8 >> 32}"
        moments, name = (buffers, "moment") if proxy == "momentum" else (run.shared.buffers, drawn)
        weight = [1.0, share][version % 2]
        expected, snapshot, moment, _ = gem(
            run.theta.copy(), buffers["snapshot"], moments[name], update, 0.05, 0.9, F(1.5), F(1e-12), F(5), convention,
            F(against), weight,
        )  # fmt: skip
        run.commit(update, version % 2, weight=weight)
        assert bits(run.theta) == bits(expected)
        assert bits(buffers["snapshot"]) == bits(snapshot)
        assert bits(moments[name]) == bits(moment)


@pytest.mark.parametrize("name", ["downpour", "adaptive", "ringmaster"])
def test_a_plain_rule_moves_theta_by_the_share_of_a_batch(name: str) -> None:
    for weight in (1.0, 0.375):
        run = Run.of(make_rule(name), np.zeros(5, F), workers=2)
        run.commit(np.ones(5, F), staleness=1, weight=weight)
        assert bits(run.theta) == bits(np.full(5, -F(0.05 * weight) / F(2 if name == "adaptive" else 1)))
