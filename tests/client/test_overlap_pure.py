"""A worker that computes while its commit is under way: each gradient is compared with the snapshot it was computed on."""

from __future__ import annotations

import numpy as np
import pytest
from gem_api.errors import LeaseEnded, Overloaded
from gem_api.hyperparameters import Hyperparameters
from gem_server.core.state_machine import Core
from gem_server.rules import RuleInput
from gem_server.rules.gem import Gem
from kit.core import SMALL, bits, commit, header, make_core

SIZE = SMALL.size
RULES = [Hyperparameters(rule="gem", snapshot=snapshot) for snapshot in ("after", "paper")]


def overlapping(core: Core, others: int = 1) -> list[str]:
    """Lease ids: first of a worker that overlaps, then of some that do not; all have pulled θ = 1."""
    ids = [core.register("overlaps", SMALL, 0.0, overlap=True).lease_id]
    ids += [core.register(f"other {number}", SMALL, 0.0).lease_id for number in range(others)]
    core.central.theta[:] = 1.0
    core.initialized()
    for lease_id in ids:
        core.pull(core.leases.get(lease_id))
    return ids


def gradients(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(3).normal(size=(count, SIZE)).astype(np.float32))


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: settings.snapshot)
@pytest.mark.parametrize("behind", [0, 1], ids=["on its last answer", "on the answer before"])
def test_a_commit_is_compared_with_the_snapshot_it_was_computed_on(settings: Hyperparameters, behind: int) -> None:
    """Against the rule itself, told by hand which snapshot that is."""
    core = make_core(settings)
    mine, other = overlapping(core)
    rule = Gem(snapshot=settings.snapshot)
    theta, moment = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    answers, versions = [theta.copy()], [0]
    steps = iter(gradients(24))
    for sequence in range(1, 9):
        base = max(0, len(answers) - 1 - behind)
        gradient = next(steps)
        buffers = {"moment": moment, "snapshot": answers[base].copy()}
        rule.apply(SMALL, theta, gradient, buffers, RuleInput(0))
        applied = commit(core, mine, sequence, gradient, base_version=versions[base])
        assert bits(core.central.theta) == bits(theta)
        assert bits(core.reply(core.leases.get(mine))) == bits(buffers["snapshot"])
        answers.append(buffers["snapshot"])
        versions.append(applied.base_version)
        for _ in range(2):  # the other moves θ, so that snapshots differ
            commit(core, other, core.leases.get(other).sequence + 1, next(steps))
        theta[:] = core.central.theta


def test_its_staleness_counts_its_own_commit_under_way() -> None:
    core = make_core()
    mine, other = overlapping(core)
    assert commit(core, mine, 1, 1.0, base_version=0).staleness == 0
    assert commit(core, mine, 2, 1.0, base_version=0).staleness == 1
    commit(core, other, 1, 1.0)
    assert commit(core, mine, 3, 1.0, base_version=1).staleness == 2


def test_it_costs_one_snapshot_more() -> None:
    core = make_core(memory_limit=4 * SIZE * (1 + 4))  # θ; m, two snapshots and the gradient
    lease_id = core.register("overlaps", SMALL, 0.0, overlap=True).lease_id
    assert core.leases.get(lease_id).nbytes == core.memory.most_for_worker == 4 * SIZE * 3
    core.leave(lease_id)
    core.memory.limit -= 1
    with pytest.raises(Overloaded):
        core.register("overlaps", SMALL, 0.0, overlap=True)
    core.register("does not", SMALL, 0.0)


@pytest.mark.parametrize(("base", "accepted"), [(1, True), (2, True), (0, False)])
def test_after_a_restart_either_snapshot_may_be_what_its_commit_was_computed_on(base: int, accepted: bool) -> None:
    core = make_core()
    mine, *_ = overlapping(core)
    for sequence, version in ((1, 0), (2, 0)):
        commit(core, mine, sequence, 1.0, base_version=version)
    core.leases.get(mine).restored = True
    if accepted:
        assert commit(core, mine, 3, 1.0, base_version=base).version == 3
    else:
        with pytest.raises(LeaseEnded):
            core.admit(header(core, mine, 3, base_version=base), 0.0)
