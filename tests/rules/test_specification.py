"""The compiled kernel of GEM equals the equations of `rules/specification.py`, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.layout import Layout, Vector
from gem_server.rules import RuleInput, Shared, make_rule
from gem_server.rules.fused import BLOCK
from gem_server.rules.specification import gem
from kit.core import bits

F = np.float32
SIZES = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 37]
COMMITS = 12


def gradient(random: np.random.Generator, size: int) -> Vector:
    """Gradients of many magnitudes, with zeros, so that π is clipped on both sides."""
    values = random.normal(size=size) * 10.0 ** random.uniform(-4, 1, size=size) * (random.random(size) > 0.1)
    return values.astype(F)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("convention", ["after", "paper", "reference"])
@pytest.mark.parametrize("proxy", ["momentum", "global"])
@pytest.mark.parametrize("against", [1.0, 0.3, 0.0])
def test_the_compiled_pass_equals_the_specification_bit_by_bit(against: float, proxy: str, convention: str, size: int) -> None:
    """Two workers in turn, so that snapshots are stale. The proxies differ in whose moment a commit continues."""
    eta, mu, kappa, epsilon, pi_max = F(0.05), F(0.9), F(1.5), F(1e-12), F(5)
    rule = make_rule("gem", snapshot=convention, proxy=proxy, kappa=1.5, epsilon=1e-12, against=against)
    random = np.random.default_rng(size)
    theta = random.normal(size=size).astype(F)
    zeros = (np.zeros(size, F) for _ in rule.shared)
    shared = Shared(dict(zip(rule.shared, zeros, strict=True)), dict(rule.numbers))
    workers = [{name: np.zeros(size, F) for name in rule.buffers} for _ in range(2)]
    for buffers in workers:
        rule.first_pull(theta, buffers)
    layout = Layout.of({"w": (size,)})
    for version in range(COMMITS):
        update, buffers = gradient(random, size), workers[version % 2]
        drawn = f"moment_{(version * 2654435761 & 0xFFFFFFFF) * 8 >> 32}"
        moments, name = (buffers, "moment") if proxy == "momentum" else (shared.buffers, drawn)
        expected, snapshot, moment, _ = gem(
            theta.copy(), buffers["snapshot"], moments[name], update, eta, mu, kappa, epsilon, pi_max, convention, F(against)
        )
        rule.apply(layout, theta, update, buffers, RuleInput(0, version, version // 2, 1.0, shared))
        assert bits(theta) == bits(expected)
        assert bits(buffers["snapshot"]) == bits(snapshot)
        assert bits(moments[name]) == bits(moment)
