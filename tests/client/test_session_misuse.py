"""What a caller does wrong with a session: a typed error each, and the session works on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client.conftest import Transport
from gem_client import InvalidRequest, LayoutMismatch, NonFiniteGradient, RejectedCommit, Session, connect
from live import Live
from session_helpers import GRADIENT, SIZE, model, theta, transports

BAD_GRADIENTS: list[Any] = [
    pytest.param(np.zeros(SIZE - 1, np.float32), LayoutMismatch, id="short"),
    pytest.param(np.zeros((3, 3), np.float32), LayoutMismatch, id="not flat"),
    pytest.param(np.zeros(SIZE, np.int64), LayoutMismatch, id="integers"),
    pytest.param(np.zeros(SIZE, np.complex64), LayoutMismatch, id="complex"),
    pytest.param({"w": np.zeros((2, 3))}, LayoutMismatch, id="a tensor missing"),
    pytest.param({**model(), "x": np.zeros(1)}, LayoutMismatch, id="a strange tensor"),
    pytest.param({"w": np.zeros((3, 2)), "b": np.zeros(3)}, LayoutMismatch, id="misshapen tensor"),
    pytest.param({"w": np.zeros((2, 3), complex), "b": np.zeros(3)}, LayoutMismatch, id="complex tensor"),
    pytest.param({"w": np.zeros((2, 3), int), "b": np.zeros(3)}, LayoutMismatch, id="integer tensor"),
    pytest.param(np.full(SIZE, np.nan, np.float32), NonFiniteGradient, id="NaN"),
    pytest.param(np.full(SIZE, np.inf, np.float32), NonFiniteGradient, id="infinity"),
    pytest.param(np.full(SIZE, 1e35, np.float32), NonFiniteGradient, id="far too large"),
    pytest.param(np.full(SIZE, 1e300), NonFiniteGradient, id="beyond float32"),
]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(("gradient", "error"), BAD_GRADIENTS)
def test_a_bad_gradient_raises_a_typed_error_and_the_next_commit_goes_through(
    transport: Transport, live: Live, session: Session, gradient: Any, error: type[RejectedCommit]
) -> None:
    session.commit(GRADIENT)
    before = theta(live)
    with pytest.raises(error):
        session.commit(gradient)
    np.testing.assert_array_equal(theta(live), before)
    np.testing.assert_array_equal(session.theta, before)
    answer = session.commit(GRADIENT)
    assert (answer.version, answer.dropped, session.generation) == (2, False, 1)
    assert transports(live) == {session.name: transport.name}


def test_another_model_is_refused_by_name_and_the_session_can_join_with_the_right_one(live: Live, session: Session) -> None:
    with connect(live.address) as other:
        with pytest.raises(LayoutMismatch, match="'v'"):
            other.join({"v": np.ones((2, 3)), "b": np.zeros(3)})
        np.testing.assert_array_equal(other.join(model()), session.theta)


@pytest.mark.parametrize("value", [np.array([1j]), np.array(["a"]), np.array([None])], ids=["complex", "text", "object"])
def test_parameters_that_are_no_real_numbers_are_refused_with_a_typed_error(live: Live, value: Any) -> None:
    with connect(live.address) as session, pytest.raises((LayoutMismatch, InvalidRequest)):
        session.join({"w": value})


def test_a_model_without_parameters_is_refused(live: Live) -> None:
    with connect(live.address) as session, pytest.raises(InvalidRequest):
        session.join({})


def test_a_first_value_that_is_no_number_is_refused_and_leaves_room_for_a_good_one(transport: Transport, live: Live) -> None:
    with connect(live.address) as session, pytest.raises(NonFiniteGradient):
        session.join({"w": np.array([np.nan])})
    assert live.on_loop(lambda: live.server.core.leases.live) == {}  # or the next would wait for it
    with connect(live.address) as session:
        np.testing.assert_array_equal(session.join({"w": np.array([2.0])}), [2.0])
        assert session.shares_memory == transport.is_memory


def test_nothing_but_pull_works_before_join(live: Live) -> None:
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match="make the Optimizer first, or call join"):
            session.shards(10)
        with pytest.raises(InvalidRequest, match="join"):
            session.commit(GRADIENT)
        with pytest.raises(InvalidRequest, match="join"):
            _ = session.hyperparameters
        with pytest.raises(InvalidRequest):
            _ = session.layout


def test_steps_of_no_batch_and_batches_of_no_sample_are_refused(live: Live) -> None:
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match="batches_per_step is a whole number, at least 1, not 0"):
            session.join(model(), batches_per_step=0)
        with pytest.raises(InvalidRequest, match=r"batches_per_step is a whole number, at least 1, not 2\.5"):
            session.join(model(), batches_per_step=2.5)  # type: ignore[arg-type]
        session.join(model())
        with pytest.raises(InvalidRequest, match="at least 1, not -1"):
            session.shards(10, -1)
        with pytest.raises(InvalidRequest, match=r"a whole number of samples, at least 1, not 2\.5"):
            session.shards(10, 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_session_is_refused(session: Session, take: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidRequest, match="a session can't be copied or pickled"):
        take(session)


def test_a_second_join_is_refused(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="joined already"):
        session.join(model())
