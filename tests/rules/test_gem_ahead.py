"""Energy matching around an optimizer: what a worker is sent, what π guards against, and how both follow the number of
workers. The equations are in docs/method.md; `test_shared_optimizers.py` holds the compiled pass to the specification."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_server.rules import RuleInput, make_rule
from kit.core import bits, commit, make_core, start
from rules.passes import Run

F = np.float32
SIZE = 16


def ahead(optimizer: str = "adamw", **settings: Any) -> Any:
    return make_rule("gem", optimizer=optimizer, learning_rate=0.01, kappa=1.5, pi_max=1.0, **settings)


def undisturbed(workers: int, gradients: Iterable[float]) -> tuple[Run, Vector]:
    """A run in which nothing is a surprise, so that π is 1: each worker computes its gradient on the θ that it meets. Returns
    the last commit's movement too."""
    run, before = Run.of(ahead(weight_decay=0.0), np.zeros(SIZE, F), workers), np.zeros(SIZE, F)
    for version, gradient in enumerate(gradients):
        before, worker = run.theta.copy(), version % workers
        run.workers[worker]["snapshot"][:] = run.theta
        facts = run.commit(np.full(SIZE, gradient, F), worker, workers - 1)
        assert facts is not None
        assert facts.max_ratio == 1.0
    return run, run.theta - before


def test_a_worker_alone_that_overlaps_is_not_held_back_by_its_own_step() -> None:
    """Its gradient is one commit late, and was computed on the point that the reply before the last one held."""
    run, sent, full = Run.of(ahead(), np.zeros(SIZE, F)), [np.zeros(SIZE, F)] * 2, []
    for version in range(12):
        run.workers[0]["snapshot"][:] = sent[-2]
        facts = run.commit(np.ones(SIZE, F), 0, min(1, version))
        assert facts is not None
        full.append(facts.max_ratio == 1.0)
        sent.append(run.workers[0]["snapshot"].copy())
    assert all(full[2:])


def test_movement_that_was_foreseen_costs_nothing_and_a_surprise_does() -> None:
    """θ arrives where a worker was sent, many more than κ·√n steps away, and π is 1. Then it is that far from the point of
    another worker."""
    run, step = undisturbed(16, [1.0] * 320)
    far, sent = 1.5 * math.sqrt(16) * abs(step).max(), run.workers[15]["snapshot"]
    assert abs(sent - run.theta).max() > 3 * far
    run.theta[:] = sent
    facts = run.commit(np.ones(SIZE, F), 15, 15)
    assert facts is not None
    assert facts.max_ratio == 1.0
    run.workers[1]["snapshot"][:] = run.theta - F(2 * far)
    facts = run.commit(np.ones(SIZE, F), 1, 15)
    assert facts is not None
    assert facts.zero_ratio == 1.0


@pytest.mark.parametrize("growth", [10.0, 0.0])
def test_the_room_for_surprises_grows_with_what_is_known(growth: float) -> None:
    """Two workers, and θ is always two steps from where it was foreseen: the first commits may not move it, later ones may."""
    run, moved = Run.of(ahead(rule_options=f"growth={growth}", weight_decay=0.0), np.zeros(SIZE, F), 2), []
    for version in range(200):
        run.workers[version % 2]["snapshot"][:] = run.theta - F(2 * 0.01 / math.sqrt(2) * 0.999)
        facts = run.commit(np.ones(SIZE, F), version % 2, 1)
        assert facts is not None
        moved.append(facts.zero_ratio == 0)
    assert moved[-1]
    assert moved[2] == (not growth)


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_noise_gives_the_step_of_one_worker_and_a_signal_its_nth_root(workers: int) -> None:
    """In doubt m̂² is small beside v̂, and |Δ| = η·|m̂|/√v̂. If all gradients are the same, |Δ| = η/√n."""
    _, step = undisturbed(workers, [1.0] * 40 * workers)
    assert abs(step).max() == pytest.approx(0.01 / math.sqrt(workers), rel=0.01)
    run, step = undisturbed(workers, [1.0, -1.0] * 100 * workers)
    mean = abs(run.shared.buffers["first_moment"]).max()
    assert mean < 0.06
    assert abs(step).max() == pytest.approx(0.01 * mean, rel=0.01)


def test_n_is_the_staleness_of_a_commit_and_one_but_at_most_four_for_each_worker() -> None:
    """Bob's commit is late by Ann's; then Cy's one is as late as if 60 workers were there, and counts as one of twelve."""
    layout, theta = Layout.of({"w": (SIZE,)}), np.zeros(SIZE, F)
    settings = Hyperparameters(optimizer="adamw", learning_rate=0.01, kappa=1.5, pi_max=1.0)
    core = make_core(settings)
    ann, bob, cy = start(core, ["ann", "bob", "cy"], layout, theta)

    def steps(lease: str, sequence: int) -> float:
        """1/h of a commit."""
        before = max(core.shared.numbers["age"], 0.0)
        commit(core, lease, sequence, np.ones(SIZE, F))
        return core.shared.numbers["age"] - before

    assert steps(ann, 1) == 1
    assert bits(core.reply(core.leases.get(ann))) == bits(core.central.theta)
    assert steps(bob, 1) == pytest.approx(1 / 1.5)
    for sequence in range(2, 60):
        assert steps(ann, sequence) == pytest.approx(1 / (1.5 if sequence == 2 else 1))
    assert steps(cy, 1) == pytest.approx(1 / 6.5)


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


def test_a_moment_forgets_however_many_workers_there_are() -> None:
    """Its weight for what it remembers stays below 1 as a float32."""
    run, many = Run.of(ahead(optimizer_options="beta2=0.99999"), np.zeros(SIZE, F)), 100_000
    second = run.shared.buffers["second_moment"]
    for value in (1.0, 0.0):
        before = second.copy()
        rule_input = RuleInput(4 * many - 1, workers=many, shared=run.shared)
        run.rule.apply(Layout.of({"w": (SIZE,)}), run.theta, np.full(SIZE, value, F), run.workers[0], rule_input)
        assert (second > before).all() if value else (second < before).all()
