"""The SDK's session against a real server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import gem_client
import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from gem_client import (
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    NonFiniteGradient,
    NotInitialized,
    RejectedCommit,
    Session,
    TransportError,
    connect,
)
from gem_client.transport.channel import Stub, open_channel
from gem_client.transport.connection import Connection
from live import DEADLINE, Live, config, serving, wait_until
from session_helpers import (
    GRADIENT,
    PLAIN,
    SIZE,
    Array,
    Patience,
    Wire,
    ended,
    expire_all,
    expire_but,
    in_background,
    model,
    outcomes,
    theta,
    version,
    workers,
)


@pytest.fixture
def session(live: Live) -> Iterator[Session]:
    """A session that has joined the run of `live`."""
    with connect(live.address) as joined:
        joined.join(model())
        yield joined


def one_lease(live: Live) -> Any:
    """The server's only lease."""
    (lease,) = live.core.leases.live.values()
    return lease


# -- join, pull, commit


def test_one_worker_joins_commits_and_sees_theta_move(live: Live) -> None:
    with gem_client.connect(live.address) as session:
        first = session.join({"w": np.ones((2, 3)), "b": np.zeros(3)}).copy()
        answer = session.commit(np.full(9, 0.5, np.float32), loss=1.0)
        assert answer.version == 1
        assert answer.staleness == 0
        np.testing.assert_array_equal(first, [1, 1, 1, 1, 1, 1, 0, 0, 0])
        assert (answer.theta < first).all()
    assert live.on_loop(lambda: dict(live.core.leases.ended)) == {"left": 1}


def test_theta_comes_back_as_a_flat_float32_array(session: Session) -> None:
    answer = session.commit(GRADIENT)
    assert isinstance(answer.theta, np.ndarray)
    assert answer.theta.dtype == np.float32
    assert answer.theta.shape == (SIZE,)


def test_commit_brings_what_the_server_now_holds(live: Live, session: Session) -> None:
    answer = session.commit(GRADIENT)
    np.testing.assert_array_equal(answer.theta, theta(live))


def test_pull_brings_what_the_server_now_holds(live: Live, session: Session) -> None:
    with connect(live.address) as other:
        other.join(model())
        other.commit(GRADIENT)
    np.testing.assert_array_equal(session.pull(), theta(live))
    assert session.version == 1


def test_reading_theta_changes_nothing_for_the_next_commit(live: Live, session: Session) -> None:
    base, own = session.base, session.theta.copy()
    with connect(live.address) as other:
        other.join(model())
        other.commit(GRADIENT)
        read = session.read()
        np.testing.assert_array_equal(read, theta(live))
        np.testing.assert_array_equal(session.theta, own)
        assert session.base == base
        assert session.commit(GRADIENT).staleness == 1
        assert not np.shares_memory(read, session.theta)


def test_a_model_may_be_pairs_whose_names_differ(live: Live) -> None:
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match="occur twice: w"):
            session.join([("w", np.ones(2)), ("w", np.ones(3))])
        assert list(session.join([("v", np.ones(2)), ("w", np.zeros(1))])) == [1, 1, 0]


@pytest.mark.parametrize(
    "gradient",
    [
        {"b": np.full(3, 2.0), "w": np.full((2, 3), 1.0)},
        {"b": [2.0, 2.0, 2.0], "w": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]},
        np.array([1.0] * 6 + [2.0] * 3, np.float64),
        np.array([1.0] * 6 + [2.0] * 3, np.float16),
        [1.0] * 6 + [2.0] * 3,
        np.repeat(np.array([1.0] * 6 + [2.0] * 3, np.float32), 2)[::2],
    ],
    ids=["mapping", "mapping of lists", "float64", "float16", "list", "not contiguous"],
)
def test_a_gradient_is_a_mapping_in_any_order_or_a_flat_array_of_floats(gradient: Any) -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        session.join(model())
        np.testing.assert_array_equal(session.commit(gradient).theta, [0.5] * 6 + [-1.0] * 3)


def test_the_caller_may_reuse_its_gradient_after_a_commit() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        session.join(model())
        gradient = np.ones(SIZE, np.float32)
        session.commit(gradient)
        np.testing.assert_array_equal(gradient, np.ones(SIZE))
        gradient[:] = -1.0
        np.testing.assert_array_equal(session.commit(gradient).theta, [1] * 6 + [0] * 3)


def test_a_large_model_passes_unharmed_in_many_chunks() -> None:
    first = np.arange(1_000_003, dtype=np.float32)
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        np.testing.assert_array_equal(session.join({"w": first}), first)
        np.testing.assert_array_equal(session.commit(first).theta, 0.5 * first)
        np.testing.assert_array_equal(theta(live), 0.5 * first)


def test_only_the_first_to_join_gives_theta_its_value(live: Live, session: Session) -> None:
    with connect(live.address) as other:
        zeros = {name: np.zeros_like(value) for name, value in model().items()}
        np.testing.assert_array_equal(other.join(zeros), session.theta)


def test_a_reader_pulls_without_joining(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    with connect(live.address) as reader:
        np.testing.assert_array_equal(reader.pull(), theta(live))
        assert reader.version == 1
        assert [tensor.name for tensor in reader.layout.tensors] == ["w", "b"]
        assert workers(live) == [session.name]


def test_a_reader_of_an_empty_server_is_told_that_there_is_no_value_yet(live: Live) -> None:
    with connect(live.address) as reader, pytest.raises(NotInitialized):
        reader.pull()


def test_the_runs_settings_come_from_the_server() -> None:
    settings = Hyperparameters(
        rule="adaptive", learning_rate=0.125, batch_size=7, shard_size=9, epochs=3, shards="replicate", seed=11
    )
    with serving(config(settings)) as live, connect(live.address) as session:
        session.join(model())
        assert session.hyperparameters == settings
        assert session.run_id == live.core.run_id


def test_loss_and_samples_reach_the_server(live: Live, session: Session) -> None:
    session.commit(GRADIENT, loss=2.5, samples=13)
    status = gem_client.Admin(live.address).status()
    assert status.workers[0].loss == 2.5
    assert status.shards.samples_committed == 13


def test_the_answer_tells_pi_only_for_a_rule_that_has_it(session: Session) -> None:
    pi = session.commit(GRADIENT).pi_median
    assert pi is not None
    assert 0 <= pi <= 5
    with serving(config(PLAIN)) as live, connect(live.address) as plain:
        plain.join(model())
        assert plain.commit(GRADIENT).pi_median is None


def test_staleness_counts_the_commits_of_others_since_the_pull(live: Live) -> None:
    with connect(live.address) as first, connect(live.address) as second:
        first.join(model())
        second.join(model())
        assert [first.commit(GRADIENT).staleness for _ in range(3)] == [0, 0, 0]
        assert second.commit(GRADIENT).staleness == 3
        assert first.commit(GRADIENT).staleness == 1
        second.pull()
        assert second.commit(GRADIENT).staleness == 0


def test_a_worker_waits_for_the_first_value_and_is_asked_for_it_when_the_first_worker_dies(live: Live) -> None:
    channel = open_channel(live.address)
    layout = Layout.of({name: value.shape for name, value in model().items()}).to_message()
    silent = Stub(channel).RegisterWorker(pb.RegisterWorkerRequest(worker_name="silent", layout=layout))
    assert silent.must_initialize
    with connect(live.address, name="second") as second:
        live.clock.advance(0.6 * live.config.lease_seconds)
        joined = in_background(lambda: second.join(model()))
        wait_until(lambda: workers(live) == ["silent", "second"], "the second worker to register")
        assert not joined.done()
        live.clock.advance(0.6 * live.config.lease_seconds)
        np.testing.assert_array_equal(joined.result(DEADLINE), [1] * 6 + [0] * 3)
    channel.close()


# -- what the caller does wrong


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
]


@pytest.mark.parametrize(("gradient", "error"), BAD_GRADIENTS)
def test_a_bad_gradient_raises_a_typed_error_and_the_next_commit_goes_through(
    live: Live, session: Session, gradient: Any, error: type[RejectedCommit]
) -> None:
    session.commit(GRADIENT)
    before = theta(live)
    with pytest.raises(error):
        session.commit(gradient)
    np.testing.assert_array_equal(theta(live), before)
    answer = session.commit(GRADIENT)
    assert (answer.version, answer.dropped, session.generation) == (2, False, 1)


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


def test_a_first_value_that_is_no_number_is_refused_and_leaves_room_for_a_good_one(live: Live) -> None:
    with connect(live.address) as session, pytest.raises(NonFiniteGradient):
        session.join({"w": np.array([np.nan])})
    assert live.on_loop(lambda: live.server.core.leases.live) == {}  # or the next would wait for it
    with connect(live.address) as session:
        np.testing.assert_array_equal(session.join({"w": np.array([2.0])}), [2.0])


def test_nothing_but_pull_works_before_join(live: Live) -> None:
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match="join"):
            session.commit(GRADIENT)
        with pytest.raises(InvalidRequest, match="join"):
            _ = session.hyperparameters
        with pytest.raises(InvalidRequest):
            _ = session.layout


def test_a_second_join_is_refused(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="joined already"):
        session.join(model())


def test_a_closed_session_is_of_no_more_use_and_closes_twice(live: Live) -> None:
    session = connect(live.address)
    session.join(model())
    session.close()
    session.close()
    for use in (lambda: session.commit(GRADIENT), session.pull, lambda: session.join(model())):
        with pytest.raises(InvalidRequest, match="closed"):
            use()
    assert ended(live) == {"left": 1}


def test_a_session_is_refused_in_another_process(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(InvalidRequest, match="fork"):
            session.commit(GRADIENT)
        with pytest.raises(InvalidRequest, match="fork"):
            session.pull()
    assert session.commit(GRADIENT).version == 1


def test_a_child_that_closes_its_parents_session_does_not_end_the_lease(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    session = connect(live.address)
    session.join(model())
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        session.close()
    left = workers(live)
    session.close()
    assert left == [session.name]


def test_the_worker_leaves_even_when_its_block_ends_with_an_error(live: Live) -> None:
    def fail() -> None:
        with connect(live.address) as session:
            session.join(model())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ended(live) == {"left": 1}


# -- leases


def test_the_lease_is_renewed_while_the_worker_computes() -> None:
    with serving(config(lease_seconds=4.5)) as live, connect(live.address) as session:
        session.join(model())
        until = live.on_loop(lambda: one_lease(live).expires_at)
        wait_until(lambda: live.on_loop(lambda: one_lease(live).expires_at) > until, "the lease to be renewed")
        assert session.generation == 1


def test_the_lease_is_renewed_from_the_moment_it_is_opened(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to the registration may have taken most of the lease, and what follows may take long too."""
    renewed: Future[float] = Future()

    def renew(connection: Connection) -> None:
        if not renewed.done():
            renewed.set_result(connection._renew_timeout)

    monkeypatch.setattr(Connection, "renew", renew)
    third = live.config.lease_seconds / 3  # 20 s
    with connect(live.address, timeout=300.0) as session:
        session.join(model())
        assert renewed.result(third / 2) <= third  # a renewal that is stuck leaves time for another


def test_a_shorter_lease_after_a_restart_is_renewed_in_time() -> None:
    with serving(config(lease_seconds=600.0)) as live:
        patience = Patience()
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        live.stop()
        with serving(replace(live.config, listen=live.address, lease_seconds=6.0)) as back, session:
            assert session.commit(GRADIENT).dropped
            until = back.on_loop(lambda: one_lease(back).expires_at)
            wait_until(
                lambda: ended(back) or back.on_loop(lambda: one_lease(back).expires_at) > until,
                "the lease to be renewed or end",
            )
            assert ended(back) == {}


def test_after_the_lease_has_ended_the_next_gradient_is_dropped_and_theta_is_fresh(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    expire_all(live)
    with connect(live.address) as other:
        other.join(model())
        other.commit(GRADIENT)
    answer = session.commit(GRADIENT)
    assert answer.dropped
    assert (answer.version, version(live), session.generation) == (2, 2, 2)
    np.testing.assert_array_equal(answer.theta, theta(live))
    after = session.commit(GRADIENT)
    assert (after.dropped, after.version, after.staleness) == (False, 3, 0)


def test_the_count_of_steps_goes_on_under_the_workers_name(live: Live) -> None:
    with connect(live.address, name="alice") as session:
        session.join(model())
        session.commit(GRADIENT)
        session.commit(GRADIENT)
        assert session.steps_done == 2
    with connect(live.address, name="alice") as again:
        again.join(model())
        assert again.steps_done == 2


def test_pull_after_the_lease_has_ended_enters_again_and_the_next_commit_counts(live: Live, session: Session) -> None:
    expire_all(live)
    session.pull()
    assert session.generation == 2
    assert not session.commit(GRADIENT).dropped


def test_a_gradient_computed_under_an_earlier_lease_is_dropped(live: Live, session: Session) -> None:
    expire_all(live)
    session.lease_shard(10, ()).result()  # enters again, while the caller still has the θ of the first lease
    assert session.generation == 2
    assert session.commit(GRADIENT).dropped
    assert version(live) == 0
    assert not session.commit(GRADIENT).dropped


def test_of_two_workers_with_one_name_the_first_is_told_and_does_not_fight(live: Live) -> None:
    with connect(live.address, name="twin") as first, connect(live.address, name="twin") as second:
        first.join(model())
        first.commit(GRADIENT)
        second.join(model())
        for use in (lambda: first.commit(GRADIENT), first.pull, lambda: first.commit(GRADIENT)):
            with pytest.raises(LeaseEnded, match="twin") as caught:
                use()
            assert caught.value.reason == "replaced"
        assert second.commit(GRADIENT).version == 2
        assert second.generation == 1
        assert ended(live) == {"replaced": 1}


# -- a server that goes and comes back, a wire that breaks


def test_a_server_that_comes_back_from_its_checkpoint_goes_on_with_the_same_lease(tmp_path: Path) -> None:
    patience = Patience()
    with serving(config(PLAIN, checkpoint_dir=tmp_path)) as live:
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        session.commit(GRADIENT)
        live.stop()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: patience.pauses, "the session to try again")
        with serving(replace(live.config, listen=live.address, resume=True)) as back, session:
            answer = waiting.result(DEADLINE)
            assert (answer.dropped, answer.version, session.generation) == (False, 2, 1)
            np.testing.assert_array_equal(answer.theta, [0.5] * 6 + [-0.5] * 3)
            assert session.commit(GRADIENT).version == 3
            assert outcomes(back) == {"applied": 3}


def test_a_session_that_has_lost_the_wire_goes_on_where_it_was(live: Live) -> None:
    with Wire(live.address) as wire, connect(wire.address, retry=Patience().retry()) as session:
        session.join(model())
        for done in range(1, 4):
            assert session.commit(GRADIENT).version == done
            wire.cut()
        assert (session.generation, outcomes(live)) == (1, {"applied": 3})


def test_a_commit_whose_answer_was_lost_is_sent_again_and_applied_once() -> None:
    with (
        serving(config(PLAIN)) as live,
        Wire(live.address) as wire,
        connect(wire.address, retry=Patience().retry()) as session,
    ):
        session.join(model())
        session.commit(GRADIENT)
        wire.lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 2, "the commit to be applied")
        wire.cut()
        answer = waiting.result(DEADLINE)
        assert (answer.version, answer.dropped) == (2, False)
        np.testing.assert_array_equal(answer.theta, [0.5] * 6 + [-0.5] * 3)
        assert outcomes(live) == {"applied": 2, "repeated": 1}


def test_after_a_restart_without_a_checkpoint_the_run_goes_on_from_the_sessions_theta() -> None:
    with serving(config(PLAIN)) as live:
        session = connect(live.address, retry=Patience().retry())
        session.join(model())
        known = session.commit(GRADIENT).theta.copy()
        live.stop()
        with serving(replace(live.config, listen=live.address)) as back, session:
            answer = session.commit(GRADIENT)
            assert answer.dropped
            assert answer.version == 0
            np.testing.assert_array_equal(answer.theta, known)
            np.testing.assert_array_equal(theta(back), known)
            assert session.commit(GRADIENT).version == 1


def test_a_server_rolled_back_behind_an_acknowledged_commit_ends_the_lease(tmp_path: Path) -> None:
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "kept")) as live:
        session = connect(live.address, retry=Patience().retry())
        session.join(model())
        session.commit(GRADIENT)
        with gem_client.Admin(live.address) as admin:
            admin.checkpoint()
        shutil.copytree(tmp_path / "kept", tmp_path / "older")
        session.commit(GRADIENT)
        live.stop()
        older = replace(live.config, listen=live.address, checkpoint_dir=tmp_path / "older", resume=True)
        with serving(older) as back, session:
            answer = session.commit(GRADIENT)
            assert (answer.dropped, answer.version, session.generation) == (True, 1, 2)
            np.testing.assert_array_equal(answer.theta, [0.75] * 6 + [-0.25] * 3)
            assert ended(back) == {"rolled_back": 1}
            assert session.commit(GRADIENT).version == 2


def test_a_session_that_gave_up_recovers_when_the_server_is_back(tmp_path: Path) -> None:
    patience = Patience()
    with serving(config(PLAIN, checkpoint_dir=tmp_path)) as live:
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        session.commit(GRADIENT)
        live.stop()
        patience.run_out()
        with pytest.raises(TransportError):
            session.commit(GRADIENT)
        with pytest.raises(TransportError):
            session.pull()
        patience.renew()
        with serving(replace(live.config, listen=live.address, resume=True)) as back, session:
            assert session.commit(GRADIENT).dropped
            assert session.commit(GRADIENT).version == 2
            np.testing.assert_array_equal(theta(back), [0.5] * 6 + [-0.5] * 3)


def test_join_gives_up_on_an_address_where_nobody_listens() -> None:
    patience = Patience()
    patience.run_out()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with connect(address, retry=patience.retry()) as session, pytest.raises(TransportError):
        session.join(model())


def test_a_listener_that_never_answers_is_given_up() -> None:
    patience = Patience()
    patience.run_out()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with connect(address, retry=patience.retry(), timeout=0.5) as session:
            for use in (lambda: session.join(model()), session.pull):
                with pytest.raises(TransportError):
                    in_background(use).result(DEADLINE)


def test_a_commit_that_makes_no_progress_is_broken_off_and_the_session_recovers(live: Live) -> None:
    patience = Patience()
    with Wire(live.address) as wire, connect(wire.address, retry=patience.retry(), timeout=1.0) as session:
        session.join(model())
        session.commit(GRADIENT)
        wire.stall()
        patience.run_out()
        with pytest.raises(TransportError):
            in_background(lambda: session.commit(GRADIENT)).result(DEADLINE)
        patience.renew()
        wire.flow()
        wire.cut()
        assert session.commit(GRADIENT).dropped
        assert not session.commit(GRADIENT).dropped


def test_a_readers_pull_that_makes_no_progress_is_broken_off(live: Live, session: Session) -> None:
    patience = Patience()
    with Wire(live.address) as wire, connect(wire.address, retry=patience.retry(), timeout=1.0) as reader:
        reader.pull()
        wire.stall()
        patience.run_out()
        with pytest.raises(TransportError):
            in_background(reader.pull).result(DEADLINE)


def test_closing_does_not_wait_long_for_a_server_that_is_gone(tmp_path: Path) -> None:
    with serving() as live:
        session = connect(live.address)
        session.join(model())
        live.stop()
        in_background(session.close).result(DEADLINE)


def test_a_silent_workers_lease_ends_and_the_other_workers_goes_on(live: Live, session: Session) -> None:
    with connect(live.address, name="busy") as busy:
        busy.join(model())
        expire_but(live, lambda: busy.commit(GRADIENT))
        assert workers(live) == ["busy"]
        assert not busy.commit(GRADIENT).dropped
        assert session.commit(GRADIENT).dropped


def test_first_value_is_in_the_order_of_the_joining_models_names(live: Live) -> None:
    first: dict[str, Array] = {"z": np.array([1, 2], np.float32), "a": np.array([3], np.float32)}
    with connect(live.address) as session:
        np.testing.assert_array_equal(session.join(first), [1, 2, 3])
        np.testing.assert_array_equal(session.layout.split(session.theta)["a"], [3])


LEFT_OPEN = """
import sys, gem_client, numpy
session = gem_client.connect(sys.argv[1], shared_memory=False)
session.join({"w": numpy.ones(3, numpy.float32)}, overlap=True)
print("joined", flush=True)
sys.stdin.readline()
session.begin_commit(numpy.ones(3, numpy.float32))
print("the end", flush=True)
"""


def test_a_session_that_nobody_closed_does_not_keep_its_process_alive() -> None:
    """The server has gone, and the commit under way is tried again for 300 seconds."""
    with serving() as live:
        command = [sys.executable, "-c", LEFT_OPEN, live.address]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "joined\n"
                live.stop()
                process.stdin.write("go on\n")
                process.stdin.flush()
                assert process.stdout.readline() == "the end\n"
                assert process.wait(DEADLINE) == 0
            finally:
                process.kill()
