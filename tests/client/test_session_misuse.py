"""What a caller does wrong with a session: a typed error each, and the session works on."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client.conftest import Transport
from gem_client import InvalidRequest, LayoutMismatch, NonFiniteGradient, RejectedCommit, Retry, Session, connect
from gem_client.transport.channel import _speaks_no_grpc
from kit.model import GRADIENT, SIZE, lane_port_of, model, theta, transports
from kit.ports import free_port
from kit.server import Live, config, serving

BAD_GRADIENTS: list[tuple[Any, type[RejectedCommit]]] = [
    (np.zeros(SIZE - 1, np.float32), LayoutMismatch),
    (np.zeros((3, 3), np.float32), LayoutMismatch),
    (np.zeros(SIZE, np.int64), LayoutMismatch),
    (np.zeros(SIZE, np.complex64), LayoutMismatch),
    ({"w": np.zeros((2, 3))}, LayoutMismatch),
    ({**model(), "x": np.zeros(1)}, LayoutMismatch),
    ({"w": np.zeros((3, 2)), "b": np.zeros(3)}, LayoutMismatch),
    ({"w": np.zeros((2, 3), complex), "b": np.zeros(3)}, LayoutMismatch),
    ({"w": np.zeros((2, 3), int), "b": np.zeros(3)}, LayoutMismatch),
    (np.full(SIZE, np.nan, np.float32), NonFiniteGradient),
    (np.full(SIZE, np.inf, np.float32), NonFiniteGradient),
    (np.full(SIZE, 1e35, np.float32), NonFiniteGradient),  # far too large
    (np.full(SIZE, 1e300), NonFiniteGradient),  # beyond float32
]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_bad_gradient_raises_a_typed_error_and_the_next_commit_goes_through(
    transport: Transport, live: Live, session: Session
) -> None:
    session.commit(GRADIENT)
    for done, (gradient, error) in enumerate(BAD_GRADIENTS, 1):
        before = theta(live)
        with pytest.raises(error):
            session.commit(gradient)
        np.testing.assert_array_equal(theta(live), before)
        np.testing.assert_array_equal(session.theta, before)
        answer = session.commit(GRADIENT)
        assert (answer.version, answer.lost, session.generation) == (done + 1, False, 1)
    assert transports(live) == {session.name: transport.name}


def test_another_model_is_refused_by_name_and_the_right_one_may_join(live: Live, session: Session) -> None:
    with connect(live.address) as other:
        with pytest.raises(LayoutMismatch, match="'v'"):
            other.join({"v": np.ones((2, 3)), "b": np.zeros(3)})
        np.testing.assert_array_equal(other.join(model()), session.theta)


def test_a_first_value_that_is_no_number_is_refused_and_leaves_room_for_a_good_one(transport: Transport, live: Live) -> None:
    with connect(live.address) as session, pytest.raises(NonFiniteGradient):
        session.join({"w": np.array([np.nan])})
    assert live.on_loop(lambda: live.server.core.leases.live) == {}  # or the next would wait for it
    with connect(live.address) as session:
        np.testing.assert_array_equal(session.join({"w": np.array([2.0])}), [2.0])
        assert session.shares_memory == transport.is_memory


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (lambda session: session.shards(10), "make the Optimizer first, or call join"),
        (lambda session: session.commit(GRADIENT), "join"),
        (lambda session: session.hyperparameters, "join"),
        (lambda session: session.update_kind, "join"),
        (lambda session: session.learning_rate, "join"),
        (lambda session: session.layout, "the layout is not known yet: join or pull first"),
    ],
)
def test_nothing_but_pull_works_before_join(use: Callable[[Session], Any], advice: str) -> None:
    with connect("127.0.0.1:1") as session, pytest.raises(InvalidRequest, match=advice):
        use(session)


JOINS: list[tuple[Any, dict[str, Any], str]] = [
    ({"w": np.array([1j])}, {}, "dtype complex128"),
    ({"w": np.array(["a"])}, {}, "dtype <U1"),
    ({"w": np.array([None])}, {}, "dtype object"),
    ({}, {}, "the layout has no tensors"),
    ([("w", np.ones(2)), ("w", np.ones(3))], {}, "occur twice: w"),
    (model(), {"batches_per_step": 0}, "batches_per_step is a whole number, at least 1, not 0"),
    (model(), {"batches_per_step": 2.5}, r"batches_per_step is a whole number, at least 1, not 2\.5"),
]


def test_a_join_that_can_not_be_is_refused_and_a_good_one_works_once(live: Live) -> None:
    with connect(live.address) as session:
        for parameters, more, advice in JOINS:
            with pytest.raises((InvalidRequest, LayoutMismatch), match=advice):
                session.join(parameters, **more)
        assert list(session.join([("v", np.ones(2)), ("w", np.zeros(1))])) == [1, 1, 0]
        with pytest.raises(InvalidRequest, match="joined already"):
            session.join(model())
        for size in (-1, 2.5):
            with pytest.raises(InvalidRequest, match=rf"a whole number of samples, at least 1, not {size}"):
                session.shards(10, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_session_is_refused(session: Session, take: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidRequest, match="a session can't be copied or pickled"):
        take(session)


def timeouts(*values: Any) -> list[tuple[dict[str, Any], str]]:
    return [({"timeout": value}, "timeout is a number of seconds above 0") for value in values]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"address": None}, "the server's address is a text such as 'localhost:50051', not None"),
        ({"address": ""}, "write HOST:PORT"),
        ({"name": 7}, "name is a text, such as name='worker-7', not 7"),
        ({"retry": 60}, r"retry is a gem_client.Retry, such as Retry\(give_up_after=60\), not 60"),
        *timeouts(0, -1, math.nan, math.inf, "60", None),
    ],
)
def test_a_slip_in_connect_is_told_at_once(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidRequest, match=advice):
        connect(**{"address": "localhost", **arguments})


@pytest.mark.parametrize("seconds", [-1, math.nan, "60", None])
@pytest.mark.parametrize("name", ["give_up_after", "first_pause", "longest_pause"])
def test_a_retry_without_a_number_of_seconds_is_refused(name: str, seconds: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is a number of seconds, at least 0"):
        Retry(**{name: seconds})


@pytest.mark.parametrize(
    ("figures", "advice"),
    [
        ({"samples": -1}, "samples is a whole number, at least 0, not -1"),
        ({"samples": 2.5}, r"samples is a whole number, at least 0, not 2\.5"),
        ({"batches": -1}, "batches is a whole number, at least 0, not -1"),
        ({"loss": "x"}, "loss is a number, such as loss.item"),
        ({"loss": [1.0, 2.0]}, "loss is a number, such as loss.item"),
        *[({"share": share}, "share is the share of a whole batch") for share in (0, -0.5, 1.5, math.nan, "half")],
        ({"kind": "gradients"}, "a commit is of kind gradient or delta, not 'gradients'"),
        ({"base": 3}, "base is what the session's property `base` was"),
    ],
)
def test_wrong_figures_of_a_commit_are_refused_before_it_is_sent(live: Live, figures: dict[str, Any], advice: str) -> None:
    with connect(live.address) as session:
        session.join(model(), overlap=True)
        for commit in (session.commit, session.begin_commit):
            with pytest.raises(InvalidRequest, match=advice):
                commit(GRADIENT, **figures)
        assert session.commit(GRADIENT, loss=np.float32(1), samples=np.int64(2)).version == 1  # type: ignore[arg-type]


def test_an_optimizer_that_is_no_name_is_refused_before_the_worker_joins(live: Live) -> None:
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match='optimizer is "worker" for one of the worker\'s own, or an OptimizerChoice'):
            session.join(model(), optimizer=np.add)  # type: ignore[arg-type]
        session.join(model())


def test_a_worker_that_has_left_by_pull_final_is_told_so(session: Session) -> None:
    session.commit(GRADIENT)
    session.pull_final()
    with pytest.raises(InvalidRequest, match="has left the run, by load_final or pull_final: open another session"):
        session.commit(GRADIENT)


def no_pause(seconds: float) -> None:
    raise AssertionError("tried again")


def test_the_port_of_http_or_of_the_lane_in_place_of_grpcs_is_recognised_at_once() -> None:
    """What the first connection gets back is not gRPC: five minutes of retries would not change that."""
    with serving(config(metrics_listen=f"127.0.0.1:{(http := free_port())}")) as live:
        for port in (http, lane_port_of(live)):
            with connect(f"127.0.0.1:{port}", retry=Retry(give_up_after=math.inf, sleep=no_pause)) as session:
                for call in (session.pull, lambda: session.join(model())):
                    with pytest.raises(InvalidRequest, match=r"does not speak gRPC: .*by default 50051"):
                        call()


def test_a_proxy_that_answers_while_the_server_is_away_is_tried_again() -> None:
    """As gRPC 1.76 words it. Another server of HTTP/1 is no proxy that waits for ours."""
    answered = "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80) (HTTP status {})"
    assert [_speaks_no_grpc(answered.format(status)) for status in (502, 503, 504, 200, 404)] == [False] * 3 + [True] * 2
    assert not _speaks_no_grpc("Socket closed")
