"""Optimizer(overlap=True) and Session.begin_commit: a commit under way while the caller computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, NonFiniteGradient, connect
from gem_client.torch import Optimizer
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
