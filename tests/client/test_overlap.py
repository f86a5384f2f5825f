"""Optimizer(overlap=True) and Session.begin_commit: a commit under way while the caller computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gem_api.errors import LeaseEnded, Overloaded
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, NonFiniteGradient, connect
from gem_client.torch import Optimizer
from gem_server.core.state_machine import Core
from gem_server.rules import RuleInput
from gem_server.rules.gem import Gem
from kit.core import SMALL, bits, commit, header, make_core
from kit.model import GRADIENT, PLAIN, SIZE, expire_all, model, outcomes, theta, version
from kit.raw_client import apply_thread_held
from kit.server import Live, config, serving
from torch import nn


@pytest.mark.usefixtures("transport")
def test_the_answer_comes_when_it_is_asked_for_and_the_base_is_told_honestly(live: Live) -> None:
    with connect(live.address) as session:
        session.join(model(), overlap=True)
        first = session.base
        session.begin_commit(GRADIENT, base=first)
        answer = session.finish_commit()
        assert answer is not None
        assert (answer.version, answer.staleness) == (1, 0)
        session.begin_commit(GRADIENT, base=first)  # computed while the first was under way
        answer = session.finish_commit()
        assert answer is not None
        assert (answer.version, answer.staleness) == (2, 1)
        assert session.finish_commit() is None


@pytest.mark.parametrize("joined_for_it", [True, False])
def test_one_commit_at_a_time_is_under_way_in_a_session_that_joined_for_it(joined_for_it: bool, live: Live) -> None:
    with connect(live.address) as session:
        session.join(model(), overlap=joined_for_it)
        if joined_for_it:
            session.begin_commit(GRADIENT)
        with pytest.raises(InvalidRequest, match=r"one commit at a time.*overlap=True"):
            session.begin_commit(GRADIENT)


@pytest.mark.usefixtures("transport")
def test_closing_a_session_waits_for_the_commit_under_way(live: Live) -> None:
    with connect(live.address) as session:
        session.join(model(), overlap=True)
        session.begin_commit(GRADIENT)
    assert version(live) == 1


@pytest.mark.usefixtures("transport")
def test_a_caller_that_fails_does_not_wait_for_it(live: Live) -> None:
    session = connect(live.address)
    session.join(model(), overlap=True)
    with apply_thread_held(live):
        live.on_loop(lambda: None)
        session.begin_commit(GRADIENT)
        session.__exit__(RuntimeError, RuntimeError(), None)  # returns although the commit can't get its turn
        assert version(live) == 0


@pytest.mark.usefixtures("transport")
def test_a_gradient_of_an_earlier_lease_is_dropped_when_its_turn_comes(live: Live) -> None:
    with connect(live.address) as session:
        session.join(model(), overlap=True)
        base = session.base
        expire_all(live)
        session.begin_commit(GRADIENT, base=base)
        first = session.finish_commit()
        session.begin_commit(GRADIENT, base=base)  # computed meanwhile, on the θ of the lease that has ended
        second = session.finish_commit()
        assert first is not None
        assert second is not None
        assert (first.lost, second.lost, version(live)) == (True, True, 0)


def quadratic(size: int = SIZE) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_each_gradient_is_taken_on_the_answer_before_the_last(weight_decay: float) -> None:
    """By hand: plain SGD on ½|x|² with every gradient, and its weight decay, one step late."""
    with serving(config(replace(PLAIN, weight_decay=weight_decay))) as live, connect(live.address) as session:
        parameter = quadratic()
        optimizer = Optimizer([("x", parameter)], session, overlap=True)
        x = [1.0]
        for step in range(6):
            optimizer.zero_grad()
            (0.5 * (parameter**2).sum()).backward()
            optimizer.step()
            x.append(x[-1] - PLAIN.learning_rate * (1 + weight_decay) * x[max(0, step - 1)])
        optimizer.finish()
        np.testing.assert_allclose(theta(live), np.full(SIZE, x[-1]), rtol=1e-6)
        np.testing.assert_allclose(parameter.detach().numpy(), theta(live))
        assert optimizer.answer is not None
        assert (optimizer.answer.version, optimizer.answer.staleness) == (6, 1)


def test_a_refused_gradient_is_raised_by_the_next_step_which_commits_its_own() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        parameter = quadratic()
        optimizer = Optimizer([("x", parameter)], session, overlap=True)
        for gradient in (1.0, float("nan")):
            parameter.grad = torch.full((SIZE,), gradient)
            optimizer.step()
        parameter.grad = torch.ones(SIZE)
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        optimizer.finish()
        assert outcomes(live) == {"applied": 2, "rejected": 1}
        np.testing.assert_allclose(theta(live), np.full(SIZE, 1.0 - 2 * PLAIN.learning_rate))


@pytest.mark.parametrize(
    "settings", [Hyperparameters(rule="agn", local_steps=3), Hyperparameters(rule="diloco")], ids=["local steps", "deltas"]
)
def test_local_steps_and_deltas_leave_no_room_for_it(settings: Hyperparameters) -> None:
    with serving(config(settings)) as live, connect(live.address) as session, pytest.raises(InvalidRequest, match="overlap"):
        Optimizer([("x", quadratic())], session, overlap=True)


# -- the core: each gradient is compared with the snapshot that it was computed on

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
    return list(np.random.default_rng(3).normal(size=(count, SMALL.size)).astype(np.float32))


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: settings.snapshot)
@pytest.mark.parametrize("behind", [0, 1], ids=["on its last answer", "on the answer before"])
def test_a_commit_is_compared_with_the_snapshot_it_was_computed_on(settings: Hyperparameters, behind: int) -> None:
    """Against the rule itself, told by hand which snapshot that is."""
    core = make_core(settings)
    mine, other = overlapping(core)
    rule = Gem(snapshot=settings.snapshot)
    theta, moment = np.ones(SMALL.size, np.float32), np.zeros(SMALL.size, np.float32)
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


def test_it_costs_one_snapshot_more() -> None:
    core = make_core(memory_limit=4 * SMALL.size * (1 + 4))  # θ; m, two snapshots and the gradient
    lease_id = core.register("overlaps", SMALL, 0.0, overlap=True).lease_id
    assert core.leases.get(lease_id).nbytes == core.memory.most_for_worker == 4 * SMALL.size * 3
    core.leave(lease_id)
    core.memory.limit -= 1
    with pytest.raises(Overloaded):
        core.register("overlaps", SMALL, 0.0, overlap=True)
    core.register("does not", SMALL, 0.0)


@pytest.mark.parametrize(("base", "accepted"), [(1, True), (2, True), (0, False)])
def test_after_a_restart_either_snapshot_may_be_what_its_commit_was_computed_on(base: int, accepted: bool) -> None:
    core = make_core()
    mine, *_ = overlapping(core)
    for sequence in (1, 2):
        commit(core, mine, sequence, 1.0, base_version=0)
    core.leases.get(mine).restored = True
    if accepted:
        assert commit(core, mine, 3, 1.0, base_version=base).version == 3
    else:
        with pytest.raises(LeaseEnded):
            core.admit(header(core, mine, 3, base_version=base), 0.0)
