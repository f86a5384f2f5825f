"""Sessions with other formats than float32, and θ as the difference to what they hold: exact on both sides, whole in doubt."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from client.conftest import Transport
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import wire_format
from gem_api.worker_theta import WorkerTheta
from gem_client import InvalidRequest, NonFiniteGradient, Session, connect
from kit.model import PLAIN, SIZE, Array, Patience, Wire, expire_all, in_background, model, outcomes, theta, version
from kit.server import DEADLINE, Live, config, serving, wait_until

RATE = PLAIN.learning_rate
GRADIENT: Array = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)


def rounded(values: Array) -> Array:
    """The values as they are after a journey in bfloat16, according to PyTorch."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def test_a_gradient_is_applied_as_its_format_has_it() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="bfloat16") as session:
        first = session.join(model()).copy()
        session.commit(GRADIENT)
        np.testing.assert_array_equal(theta(live), first - np.float32(RATE) * rounded(GRADIENT))


def test_parameters_come_as_their_format_has_them_and_stay_exact_on_the_server() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, theta_dtype="bfloat16") as session:
        session.join(model())
        answer = session.commit(GRADIENT)
        exact = theta(live)
        assert not np.array_equal(exact, rounded(exact))
        np.testing.assert_array_equal(answer.theta, rounded(exact))
        np.testing.assert_array_equal(session.pull(), rounded(exact))


def test_what_int8_rounds_away_comes_with_later_commits() -> None:
    """Error feedback: an element far smaller than its block's largest would never be heard of without it."""
    gradient = np.full(SIZE, 1e-3, np.float32)
    gradient[0] = 1.0
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8") as session:
        first = session.join(model()).copy()
        for _ in range(100):
            session.commit(gradient)
        moved = (first - theta(live)) / RATE
        np.testing.assert_allclose(moved, 100 * gradient, atol=1 / 127)


def test_the_conversion_is_compiled_before_the_first_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes about a second, in which others would wait for the commit."""
    form = wire_format("int8")
    prepared = Mock()
    monkeypatch.setattr(type(form), "prepare", prepared)
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8", shared_memory=False) as session:
        session.join(model())
        prepared.assert_called_with()


def test_a_gradient_that_was_refused_leaves_no_trace_in_the_next() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, gradient_dtype="int8") as session:
        first = session.join(model()).copy()
        with pytest.raises(NonFiniteGradient):
            session.commit(np.full(SIZE, np.nan, np.float32))
        session.commit(np.ones(SIZE, np.float32))
        np.testing.assert_array_equal(theta(live), first - np.float32(RATE))
        assert outcomes(live) == {"applied": 1, "rejected": 1}


@pytest.mark.parametrize("wrong", [{"gradient_dtype": "float16"}, {"theta_dtype": ""}])
def test_a_format_that_does_not_exist_is_refused_with_those_that_do(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=r"float32.*bfloat16"):
        connect("127.0.0.1:1", **wrong)  # type: ignore[arg-type]


# -- θ as the difference to what the worker holds

network_only = pytest.mark.parametrize("transport", ["grpc", "tcp"], indirect=True)


def held(live: Live) -> WorkerTheta | None:
    """What the server knows of its only worker."""
    lease = live.on_loop(lambda: next(iter(live.core.leases.live.values())))
    found: WorkerTheta | None = lease.worker_theta
    return found


def formats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats in which θ comes from now on."""
    found: list[str] = []
    form = WorkerTheta.next_format

    def noting(self: WorkerTheta, sequence: int, is_difference: bool) -> Any:
        found.append("difference" if is_difference else "whole")
        return form(self, sequence, is_difference)

    monkeypatch.setattr(WorkerTheta, "next_format", noting)
    return found


def commits(session: Session, count: int) -> None:
    for number in range(count):
        session.commit(GRADIENT * np.float32(number + 1))


@network_only
def test_the_first_is_whole_and_the_next_are_differences(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config(PLAIN, **transport.settings)) as live, connect(live.address, theta_dtype="int8") as session:
        np.testing.assert_array_equal(session.join(model()), theta(live))
        found = formats(monkeypatch)
        commits(session, 4)
        assert found == ["whole"] * 2 + ["difference"] * 6  # the server's and the worker's
        known = held(live)
        assert known is not None
        assert session.theta.tobytes() == known.theta.tobytes() != theta(live).tobytes()
        assert np.abs(session.theta - theta(live)).max() <= 4 * PLAIN.learning_rate * np.abs(GRADIENT).max() / 254
        np.testing.assert_array_equal(session.pull(), theta(live))


@network_only
def test_after_a_reply_that_was_lost_theta_comes_whole(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(config(PLAIN, **transport.settings)) as live,
        Wire(live.address, live) as wire,
        connect(wire.address, retry=Patience().retry(), theta_dtype="int8") as session,
    ):
        session.join(model())
        commits(session, 2)
        wire.lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 3, "the commit to be applied")
        known = held(live)
        wait_until(lambda: known is not None and known.sequence == 3, "the server to take its reply for received")
        wire.cut()
        found = formats(monkeypatch)
        np.testing.assert_array_equal(waiting.result(DEADLINE).theta, theta(live))
        assert found == ["whole", "whole"]
        assert outcomes(live) == {"applied": 3, "repeated": 1}
        commits(session, 1)
        assert found[2:] == ["difference", "difference"]


@network_only
def test_a_new_lease_begins_with_a_whole_theta(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"lease_seconds": 60.0, **transport.settings}
    with serving(config(PLAIN, **settings)) as live, connect(live.address, theta_dtype="int8") as session:
        session.join(model())
        commits(session, 2)
        expire_all(live)
        session.commit(GRADIENT)  # it is lost, and the session has a new lease
        found = formats(monkeypatch)
        answer = session.commit(GRADIENT)
        assert found == ["whole", "whole"]
        np.testing.assert_array_equal(answer.theta, theta(live))


def test_what_the_user_does_to_theta_changes_no_later_one() -> None:
    with serving(config(PLAIN, memory_socket="")) as live, connect(live.address, theta_dtype="int8") as session:
        session.join(model())
        for _ in range(3):
            session.commit(GRADIENT).theta[:] = np.nan
        answer = session.commit(GRADIENT)
        np.testing.assert_allclose(answer.theta, theta(live), atol=PLAIN.learning_rate * np.abs(GRADIENT).max() / 200)


def test_without_room_to_keep_what_a_worker_holds_theta_stays_whole() -> None:
    with serving(config(PLAIN, memory_socket="")) as live, connect(live.address, theta_dtype="int8") as session:
        session.join(model())
        live.on_loop(lambda: setattr(live.core.memory, "limit", live.core.memory.held))
        for _ in range(2):
            np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert held(live) is None
        live.on_loop(lambda: setattr(live.core.memory, "limit", live.core.memory.held + 4 * SIZE))
        before = live.on_loop(lambda: live.core.memory.held)
        commits(session, 2)
        assert held(live) is not None
        assert live.on_loop(lambda: live.core.memory.held) == before + 4 * SIZE


def test_a_difference_to_what_the_worker_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is wrong about it must not go unnoticed."""
    from gem_server.intake import commit_exchange

    def wrong(core: Any, lease: Any, message: pb.CommitHeader, asked: Any) -> Any:
        return WorkerTheta(SIZE).next_format(message.sequence, is_difference=True)

    with serving(config(PLAIN, memory_socket="")) as live:
        retry = Patience().retry()
        with connect(live.address, theta_dtype="int8", retry=retry) as session:
            session.join(model())
            original = commit_exchange.theta_format
            monkeypatch.setattr(commit_exchange, "theta_format", wrong)
            waiting = in_background(lambda: session.commit(GRADIENT))
            wait_until(lambda: outcomes(live).get("repeated", 0) > 0, "the worker to ask again")
            monkeypatch.setattr(commit_exchange, "theta_format", original)
            np.testing.assert_array_equal(waiting.result(DEADLINE).theta, theta(live))


def test_a_pull_in_int8_is_answered_whole() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        session.join(model())
        stub = session._member.links.leader.connection._stub
        frames = b"".join(stub.Pull(pb.PullRequest(theta_dtype=tensors_pb2.WIRE_DTYPE_INT8_BLOCK)))
        assert theta(live).tobytes() in frames
