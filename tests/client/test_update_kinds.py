"""The kind of update that a NumPy loop commits, the weight decay that the session adds, and what the run's rule does with
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from client.conftest import Transport
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, Session, connect
from kit.model import GRADIENT, PLAIN, SIZE, Array, model, outcomes, theta, version
from kit.server import Live, config, serving

DELTAS = replace(PLAIN, local_steps=4)
DECAYING = replace(PLAIN, weight_decay=0.1)
FIRST: Array = np.array([1.0] * 6 + [0.0] * 3, np.float32)


@contextmanager
def joined(settings: Hyperparameters, transport: Transport | None = None, **overlap: Any) -> Iterator[tuple[Live, Session]]:
    """A server, and a worker in its run."""
    with (
        serving(config(settings, **(transport.settings if transport else {}))) as live,
        connect(live.address) as session,
    ):
        session.join(model(), **overlap)
        assert session.shares_memory == (transport is not None and transport.is_memory)
        yield live, session


# -- the kind


@pytest.mark.parametrize(
    ("settings", "wrong", "advice"),
    [
        (DELTAS, "gradient", 'make the steps on the worker, and commit what they have changed, with kind="delta"'),
        (PLAIN, "delta", 'join with optimizer="worker", or start the server with --optimizer worker'),
    ],
    ids=["deltas", "gradients"],
)
def test_a_commit_of_the_other_kind_is_refused_and_changes_nothing(settings: Hyperparameters, wrong: Any, advice: str) -> None:
    with joined(settings) as (live, session):
        with pytest.raises(InvalidRequest, match=f"takes a {session.update_kind}.*holds a {wrong}: .*{advice}"):
            session.commit(GRADIENT, kind=wrong)
        np.testing.assert_array_equal(theta(live), FIRST)
        assert version(live) == 0


def test_a_worker_that_brings_its_optimizer_commits_deltas_or_is_refused() -> None:
    """A plain server takes it, as from PyTorch. One with an optimizer for all workers says how to use that."""
    with joined(PLAIN, optimizer="worker") as (live, session):
        assert session.update_kind == "delta"
        session.commit(GRADIENT, kind="delta")
        np.testing.assert_array_equal(theta(live), FIRST + 0.5)
        with pytest.raises(InvalidRequest, match=r"takes a delta.*holds a gradient"):
            session.commit(GRADIENT)
    advice = "adamw on the server.*without PyTorch join without `optimizer`.* --optimizer worker"
    adamw = config(Hyperparameters(optimizer="adamw"), given=frozenset({"optimizer"}))
    with serving(adamw) as live, connect(live.address) as session:
        with pytest.raises(InvalidRequest, match=advice):
            session.join(model(), optimizer="worker")
        session.join(model())


@pytest.mark.parametrize(
    ("settings", "optimizer", "lines"),
    [
        (PLAIN, None, 1),
        (Hyperparameters(optimizer="adamw"), None, 0),  # so the operator wants it
        (PLAIN, "worker", 0),
        (DELTAS, None, 0),
    ],
    ids=["sgd", "adamw", "brought", "deltas"],
)
def test_a_loop_that_asks_for_the_kind_is_told_once_that_its_own_optimizer_would_not_be_used(
    settings: Hyperparameters, optimizer: Any, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with joined(settings, optimizer=optimizer) as (_, session):
        assert session.update_kind == session.update_kind
    told = [record.getMessage() for record in caplog.records if "--optimizer worker" in record.getMessage()]
    assert [line.count("an optimizer of this worker is not used") for line in told] == [1] * lines


def test_a_delta_is_added_as_it_is(transport: Transport) -> None:
    """Without weight decay, which its steps contain already."""
    with joined(replace(DELTAS, weight_decay=0.1), transport, overlap=True) as (live, session):
        session.commit(GRADIENT, kind="delta")
        np.testing.assert_array_equal(theta(live), FIRST + 0.5)
        session.begin_commit(GRADIENT, kind="delta")
        session.finish_commit()
        np.testing.assert_array_equal(theta(live), FIRST + 1.0)


# -- weight decay and the rate


def test_weight_decay_is_added_to_a_gradient_at_the_theta_handed_out_last(transport: Transport) -> None:
    with joined(DECAYING, transport) as (live, session):
        expected = FIRST.copy()
        given = GRADIENT.copy()
        for _ in range(3):
            session.commit(given)
            expected -= PLAIN.learning_rate * (GRADIENT + 0.1 * expected)
            np.testing.assert_allclose(theta(live), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(given, GRADIENT)  # the caller's own array is left alone


def test_weight_decay_is_added_to_named_tensors_and_to_the_sessions_own_buffer() -> None:
    with joined(DECAYING) as (live, session):
        session.commit({"w": np.zeros((2, 3)), "b": np.zeros(3)})
        np.testing.assert_allclose(theta(live), FIRST * (1 - 0.05), rtol=1e-6)
        session.gradient[:] = 0
        session.commit(session.gradient)
        np.testing.assert_allclose(theta(live), FIRST * (1 - 0.05) ** 2, rtol=1e-6)
        before = theta(live)
        session.commit(np.zeros(SIZE, np.float32), decay=False)  # the caller has added it already
        np.testing.assert_array_equal(theta(live), before)


def test_the_learning_rate_is_that_of_the_version_handed_out_last() -> None:
    settings = replace(PLAIN, warmup_versions=4)
    with joined(settings) as (live, session), connect(live.address) as other:
        other.join(model())
        assert session.learning_rate == PLAIN.learning_rate / 4
        other.commit(GRADIENT)
        assert session.learning_rate == PLAIN.learning_rate / 4
        session.commit(GRADIENT)
        assert session.learning_rate == PLAIN.learning_rate * 3 / 4
        assert other.learning_rate == PLAIN.learning_rate / 2
        other.pull()
        assert other.learning_rate == PLAIN.learning_rate * 3 / 4


# -- what becomes of it


def test_a_commit_that_the_rule_discards_is_told_and_brings_fresh_theta() -> None:
    settings = replace(PLAIN, rule="ringmaster", rule_options="threshold=1")
    with joined(settings) as (live, session), connect(live.address) as other:
        other.join(model())
        assert not other.commit(GRADIENT).discarded
        answer = session.commit(GRADIENT)
        assert (answer.discarded, answer.lost, answer.staleness, answer.version) == (True, False, 1, 1)
        np.testing.assert_array_equal(answer.theta, theta(live))
        np.testing.assert_array_equal(theta(live), FIRST - 0.25)
        assert not session.commit(GRADIENT).discarded
        assert outcomes(live) == {"applied": 2, "discarded": 1}
