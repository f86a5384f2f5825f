"""The update rules equal, bit by bit, an oracle that does the same arithmetic from the equations."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_server.core.values import Applied
from gem_server.rules import PiStatistics
from gem_server.rules.fused import BLOCK
from kit.core import bits, commit, make_core, start
from rules.oracle import Facts, Oracle, bin_of, counted, histogram, lower_median, with_pi

WORKERS = ["ann", "bob", "cy"]
LAYOUTS = {
    "one element": Layout.of({"w": (1,)}),
    "small, odd sizes": Layout.of({"conv": (3, 5, 7), "scalar": (), "empty": (0,), "bias": (9,)}),
    "a whole block, counted": Layout.of({"most": (BLOCK - 1,), "bias": (1,), "scalar": ()}),
    "blocks and a bit": Layout.of({"exact": (BLOCK,), "bias": (1,), "long": (BLOCK + 37,), "scalar": ()}),
}
COMMITS = 60
BIN = 1 / 16  # relative width of a bin at most


def gradients(size: int, count: int, seed: int) -> list[np.ndarray]:
    """Gradients of many magnitudes, with zeros and changes of sign, so that π is clamped on both sides and between."""
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.uniform(-4, 1, size=(count, size))
    values = random.normal(size=(count, size)) * scales * (random.random((count, size)) > 0.1)
    return list(values.astype(np.float32))


def assert_same_facts(applied: Applied, facts: Facts, layout: Layout, pi_max: float) -> None:
    assert applied.pi is not None
    assert applied.pi.counts.sum() == pytest.approx(with_pi(facts.pi).size, abs=0.05 * layout.size)  # a sample of large tensors
    if all(len(counted(tensor.size)) == tensor.size for tensor in layout.tensors):
        assert_same_histogram(applied.pi, facts, layout, pi_max)
    # Sums of float32 in any order: as close as 2,048 of them to a block allow.
    assert applied.pi.proxy_energy == pytest.approx(facts.proxy_energy, rel=1e-4)
    assert applied.pi.central_energy == pytest.approx(facts.central_energy, rel=1e-3, abs=1e-10)


def assert_same_histogram(pi: PiStatistics, facts: Facts, layout: Layout, pi_max: float) -> None:
    """Where every parameter is counted; tests/rules/test_statistics.py has the others."""
    np.testing.assert_array_equal(pi.counts, histogram(facts.pi, pi_max))
    among = max(1, with_pi(facts.pi).size)
    assert pi.zero_ratio == np.count_nonzero(facts.pi == 0) / among
    assert pi.max_ratio == np.count_nonzero(facts.pi == np.float32(pi_max)) / among
    for begin, end, median in zip(layout.offsets[:-1], layout.offsets[1:], pi.tensor_medians, strict=True):
        assert_same_bin(float(median), lower_median(facts.pi[begin:end]), pi_max)
    assert_same_bin(pi.median, lower_median(facts.pi), pi_max)


def assert_same_bin(value: float, exact: float, pi_max: float) -> None:
    if bin_of(exact, pi_max) in (0, 255):
        assert value == exact
    elif bin_of(exact, pi_max) > 1:
        assert value == pytest.approx(exact, rel=BIN)
    else:
        assert 0 <= value <= exact * (1 + BIN) + pi_max * 2.0**-15


RULES = [("gem", "after"), ("gem", "paper"), ("gem", "reference"), ("downpour", "after"), ("adaptive", "after")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rule", "snapshot"), RULES)
def test_a_rule_equals_the_oracle_bit_by_bit_over_interleaved_commits(layout: str, rule: str, snapshot: str) -> None:
    tensors, pi_max, is_gem = LAYOUTS[layout], 5.0, rule == "gem"
    epsilon = 1e-12 if snapshot == "reference" else 1e-16
    settings = Hyperparameters(
        rule=rule, learning_rate=0.05, momentum=0.9, kappa=1.5, epsilon=epsilon, pi_max=pi_max, snapshot=snapshot
    )
    random = np.random.default_rng(7)
    theta = random.normal(size=tensors.size).astype(np.float32)
    core = make_core(settings)
    leases = dict(zip(WORKERS, start(core, WORKERS, tensors, theta), strict=True))
    oracle = Oracle(rule, theta, WORKERS, eta=0.05, mu=0.9, kappa=1.5, epsilon=epsilon, pi_max=pi_max, snapshot=snapshot)
    for name in WORKERS:
        oracle.pull(name)
    sequences = dict.fromkeys(WORKERS, 0)
    clamped, staleness = np.zeros(3, bool), set()
    for number, gradient in enumerate(gradients(tensors.size, COMMITS, seed=11)):
        name = WORKERS[random.integers(len(WORKERS))]
        if number % 17 == 16:  # a worker may pull anew at any time
            core.pull(core.leases.get(leases[name]))
            oracle.pull(name)
        sequences[name] += 1
        applied = commit(core, leases[name], sequences[name], gradient)
        facts = oracle.commit(name, gradient)
        staleness.add(facts.staleness)
        lease, worker = core.leases.get(leases[name]), oracle.workers[name]
        assert bits(core.central.theta) == bits(oracle.theta)
        assert bits(lease.buffers["snapshot"]) == bits(worker.snapshot)
        assert bits(core.reply(lease)) == bits(worker.answer)
        assert (applied.staleness, applied.base_version) == (facts.staleness, worker.base_version)
        assert (applied.pi is None) == (not is_gem)
        if is_gem:
            assert bits(lease.buffers["moment"]) == bits(worker.moment)
            assert_same_facts(applied, facts, tensors, pi_max)
            bins = bin_of(with_pi(facts.pi), pi_max)
            clamped |= [0 in bins, 255 in bins, ((bins > 0) & (bins < 255)).any()]
    assert max(staleness) > 1
    assert clamped.all() or not is_gem, "the gradients must reach π = 0, π = π_max and what lies between, or little is tested"
