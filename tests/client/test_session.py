"""The SDK's session against a real server: join, pull, read and commit."""

from __future__ import annotations

from typing import Any

import gem_client
import numpy as np
import pytest
from client.conftest import Transport
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from gem_client import InvalidRequest, NotInitialized, Session, connect
from gem_client.transport.channel import Stub, open_channel
from kit.model import GRADIENT, PLAIN, SIZE, in_background, model, theta, workers
from kit.server import DEADLINE, Live, config, serving, wait_until


@pytest.mark.usefixtures("transport")
def test_one_worker_joins_commits_and_sees_theta_move(live: Live) -> None:
    with gem_client.connect(live.address) as session:
        first = session.join({"w": np.ones((2, 3)), "b": np.zeros(3)}).copy()  # in the order of the model
        answer = session.commit(np.full(9, 0.5, np.float32), loss=1.0)
        assert answer.version == 1
        assert answer.staleness == 0
        np.testing.assert_array_equal(first, [1, 1, 1, 1, 1, 1, 0, 0, 0])
        assert (answer.theta < first).all()
    assert live.on_loop(lambda: dict(live.core.leases.ended)) == {"left": 1}


@pytest.mark.usefixtures("transport")
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


def test_an_evaluation_is_that_of_the_theta_received_last_or_of_one_that_was_read(live: Live, session: Session) -> None:
    def evaluated() -> int:
        with gem_client.Admin(live.address) as admin:
            return admin.status().evaluation.version

    with connect(live.address) as other:
        other.join(model())
        assert (session.read_version, other.commit(GRADIENT).version) == (0, 1)
        session.read()
        session.report_evaluation(0.5)
        assert evaluated() == 0
        session.report_evaluation(0.5, version=session.read_version)
        assert (session.read_version, evaluated()) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"loss": "x"}, "loss is a number"),
        ({"accuracy": []}, "accuracy is a number"),
        ({"version": -1}, "version is that of a θ"),
        ({"version": 0.5}, "version is that of a θ"),
        ({"version": True}, "version is that of a θ"),
    ],
)
def test_wrong_figures_of_an_evaluation_are_refused(session: Session, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        session.report_evaluation(**{"loss": 1.0, **wrong})


FLAT = np.array([1.0] * 6 + [2.0] * 3, np.float32)
GRADIENTS: dict[str, Any] = {
    "mapping": {"b": np.full(3, 2.0), "w": np.full((2, 3), 1.0)},
    "mapping of lists": {"b": [2.0, 2.0, 2.0], "w": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]},
    "float64": FLAT.astype(np.float64),
    "float16": FLAT.astype(np.float16),
    "list": FLAT.tolist(),
    "big-endian": FLAT.astype(">f4"),
    "not contiguous": np.repeat(FLAT, 2)[::2],
    "read-only": np.frombuffer(FLAT.tobytes(), np.float32),
}


def test_a_gradient_is_a_mapping_in_any_order_or_a_flat_array_of_floats(transport: Transport) -> None:
    with serving(config(PLAIN, **transport.settings)) as live, connect(live.address) as session:
        session.join(model())
        for done, (kind, gradient) in enumerate(GRADIENTS.items(), 1):
            expected = [1 - 0.5 * done] * 6 + [-1.0 * done] * 3
            np.testing.assert_array_equal(session.commit(gradient).theta, expected, err_msg=kind)


def test_the_caller_may_reuse_its_gradient_after_a_commit(transport: Transport) -> None:
    with serving(config(PLAIN, **transport.settings)) as live, connect(live.address) as session:
        session.join(model())
        gradient = np.ones(SIZE, np.float32)
        session.commit(gradient)
        np.testing.assert_array_equal(gradient, np.ones(SIZE))
        gradient[:] = -1.0
        np.testing.assert_array_equal(session.commit(gradient).theta, [1] * 6 + [0] * 3)


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


def test_a_waiting_worker_is_asked_for_the_first_value_when_the_first_dies(live: Live) -> None:
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
