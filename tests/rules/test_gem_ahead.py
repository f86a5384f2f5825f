"""Energy matching around an optimizer: what a worker is sent, what π guards against, and how both follow the number of
workers. The equations are in docs/method.md; `test_shared_optimizers.py` holds the compiled pass to the specification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_server.rules import make_rule
from kit.core import bits, commit, make_core, start
from rules.passes import Run

F = np.float32
SIZE = 16


def ahead(optimizer: str = "adamw", **settings: Any) -> Any:
    return make_rule("gem", optimizer=optimizer, learning_rate=0.01, kappa=1.5, pi_max=1.0, **settings)


def constant_gradients(workers: int, commits: int) -> tuple[Run, list[Vector]]:
    """A run whose gradients are all the same, and θ after each commit."""
    run, thetas = Run.of(ahead(), np.zeros(SIZE, F), workers), []
    for version in range(commits):
        run.commit(np.ones(SIZE, F), version % workers)
        thetas.append(run.theta.copy())
    return run, thetas


def test_a_worker_holds_a_point_ahead_of_theta_in_the_direction_of_its_step() -> None:
    run, thetas = constant_gradients(4, 12)
    step, lead = thetas[-1] - thetas[-2], run.workers[11 % 4]["snapshot"] - run.theta
    age = 12 / 2.5
    np.testing.assert_allclose(lead, 1.5 * 3 * age / (age + 1) * step, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lion", "worker"])
def test_one_worker_alone_is_sent_theta_itself(optimizer: str) -> None:
    random = np.random.default_rng(1)
    run = Run.of(ahead(optimizer), random.normal(size=SIZE).astype(F))
    for _ in range(5):
        facts = run.commit(random.normal(size=SIZE).astype(F) * F(0.01))
        assert bits(run.theta) == bits(run.workers[0]["snapshot"])
        assert facts is not None
        assert facts.max_ratio == 1.0


def test_movement_that_was_foreseen_costs_nothing_and_a_surprise_does() -> None:
    """16 workers with the same gradients move θ by far more than κ·√n steps in a round, and π stays 1. Then one whose point is
    elsewhere is held back."""
    run, thetas = constant_gradients(16, 320)
    step = abs(thetas[-1] - thetas[-2]).max()
    assert abs(thetas[-1] - thetas[-17]).max() > 2 * 1.5 * math.sqrt(16) * step
    facts = run.commit(np.ones(SIZE, F), 0)
    assert facts is not None
    assert facts.max_ratio == 1.0
    run.workers[1]["snapshot"][:] = run.theta + F(1.5 * math.sqrt(16) * 2 * step)
    facts = run.commit(np.ones(SIZE, F), 1)
    assert facts is not None
    assert facts.zero_ratio == 1.0


def test_in_doubt_a_commit_moves_as_far_as_that_of_one_worker_and_with_a_clear_signal_by_its_nth_root() -> None:
    """Noise: m̂² is small beside v̂, so |Δ| = η·|m̂|/√v̂ whatever n is. The same gradient again and again: |Δ| = η/√n."""
    for workers in (1, 4, 16):
        _, thetas = constant_gradients(workers, 40 * workers)
        assert abs(thetas[-1] - thetas[-2]).max() == pytest.approx(0.01 / math.sqrt(workers), rel=0.01)


def test_the_number_of_workers_is_that_of_the_leases_and_follows_who_joins_and_leaves() -> None:
    """Commits of one worker, in runs that differ in how many others hold a lease, and in one where the others leave."""
    layout, theta = Layout.of({"w": (SIZE,)}), np.ones(SIZE, F)
    settings = Hyperparameters(optimizer="adamw", learning_rate=0.01, kappa=1.5, pi_max=1.0)
    moved = {}
    for others in (0, 3):
        core = make_core(settings)
        lease, *rest = start(core, ["ann", *"bcd"[:others]], layout, theta)
        commit(core, lease, 1, np.ones(SIZE, F))
        moved[others] = core.central.theta - theta
        assert (bits(core.reply(core.leases.get(lease))) == bits(core.central.theta)) == (others == 0)
        for other in rest:
            core.leave(other)
        commit(core, lease, 2, np.ones(SIZE, F))
        assert bits(core.reply(core.leases.get(lease))) == bits(core.central.theta)
    np.testing.assert_allclose(moved[3], moved[0] / 2, rtol=1e-4)


def test_a_checkpoint_of_an_earlier_release_goes_on_with_its_number_of_commits() -> None:
    """It has moments, but not the sum of 1/h: then h was 1, and the sum is the version."""
    rule = ahead()
    new, old = (Run.of(rule, np.zeros(SIZE, F)) for _ in range(2))
    for _ in range(7):
        new.commit(np.ones(SIZE, F))
        old.commit(np.ones(SIZE, F))
    old.shared.numbers = dict(rule.numbers)
    for run in (new, old):
        run.commit(np.full(SIZE, 0.5, F))
    assert bits(new.theta) == bits(old.theta)
