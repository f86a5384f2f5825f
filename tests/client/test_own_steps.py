"""`OwnSteps`: a worker's own optimizer, in a framework that the SDK doesn't know, trains on a plain server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, LayoutMismatch, NonFiniteGradient, OwnSteps, Session, connect
from kit.model import Array, expire_all, in_background, outcomes, theta, version
from kit.server import DEADLINE, Live, config, serving

INPUTS: Array = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
TARGETS: Array = INPUTS @ np.array([2.0, -1.0], np.float32) + np.float32(0.5)
EVERY = [*range(64)]


class Variable:
    """As in JAX: its array is replaced, never written, and may be the one that was assigned."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value

    def assign(self, value: Any) -> None:
        self.value = value


class Line:
    """A linear model with Adam.

    Attributes:
        losses: Those of its steps so far.
    """

    def __init__(self) -> None:
        self.variables = {"weight": Variable(np.zeros(2, np.float32)), "bias": Variable(np.zeros(1))}
        self._moments = dict.fromkeys(self.variables, (0.0, 0.0))
        self.losses: list[float] = []

    def own_steps(self, session: Session) -> OwnSteps:
        return OwnSteps(session, lambda: self.variables, Variable.assign)

    def train(self, batch: Any = EVERY) -> float:
        """Makes a step and returns its loss."""
        weight, bias = (variable.value for variable in self.variables.values())
        error = INPUTS[batch] @ weight + bias - TARGETS[batch]
        gradient = {"weight": 2 * error @ INPUTS[batch] / len(error), "bias": np.array([2 * error.mean()])}
        for name, variable in self.variables.items():
            first, second = self._moments[name]
            first, second = 0.9 * first + 0.1 * gradient[name], 0.99 * second + 0.01 * gradient[name] ** 2
            self._moments[name] = first, second
            variable.value = variable.value - 0.05 * first / (np.sqrt(second) + 1e-8)
        self.losses.append(float(np.mean(error**2)))
        return self.losses[-1]

    @property
    def packed(self) -> Array:
        return np.concatenate([variable.value for variable in self.variables.values()]).astype(np.float32)


@pytest.mark.parametrize(("rule", "local_steps"), [("gem", 1), ("gem", 4), ("downpour", 1)])
def test_one_worker_trains_as_without_a_server_and_needs_no_flag(rule: str, local_steps: int) -> None:
    plain, line = Line(), Line()
    for _ in range(42):
        plain.train()
    with serving(config(Hyperparameters(rule=rule, local_steps=local_steps))) as live, connect(live.address) as session:
        own = line.own_steps(session)
        for _ in range(42):
            own.step(line.train())
        assert (live.server.core.settings.optimizer, version(live)) == ("worker", 42 // local_steps)
        own.load_final()
        assert version(live) == -(-42 // local_steps)  # a window that the end cuts short, too
        np.testing.assert_array_equal(line.packed, theta(live))
    np.testing.assert_allclose(line.losses, plain.losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(line.packed, plain.packed, rtol=1e-4, atol=1e-6)


def test_two_workers_share_the_epochs_and_end_with_the_same_model() -> None:
    def work(live: Live) -> Line:
        line = Line()
        with connect(live.address) as session:
            own, shards = line.own_steps(session), session.shards(len(INPUTS))
            while not shards.complete:
                for batch in shards:
                    own.step(line.train(batch))
            own.load_final()
        return line

    settings = Hyperparameters(epochs=12, batch_size=4, shard_size=16, local_steps=2)
    with serving(config(settings, min_workers=2)) as live:
        lines = [worker.result(DEADLINE) for worker in [in_background(lambda: work(live)) for _ in range(2)]]
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == 12 * len(INPUTS)
        assert version(live) == sum(len(line.losses) for line in lines) / 2
        for line in lines:
            np.testing.assert_array_equal(line.packed, theta(live))
            assert np.mean(line.losses[-5:]) < 0.05 * line.losses[0]


def test_values_that_were_loaded_stay_as_they_are_when_the_next_theta_comes() -> None:
    line = Line()
    with serving() as live, connect(live.address) as session:
        own = line.own_steps(session)
        own.step(line.train())
        kept, before = line.variables["weight"].value, line.variables["weight"].value.copy()
        own.step(line.train())
        assert not np.array_equal(line.variables["weight"].value, before)
        np.testing.assert_array_equal(kept, before)


def test_the_default_writes_into_arrays() -> None:
    weight = np.ones(3)
    with serving() as live, connect(live.address) as session:
        own, array = OwnSteps(session, lambda: {"weight": weight}), weight
        weight -= 0.25
        own.step()
        np.testing.assert_array_equal(theta(live), np.full(3, 0.75))
        with connect(live.address) as other:
            OwnSteps(other, lambda: {"weight": weight + 100}, lambda _, value: np.copyto(array, value + 7))
            np.testing.assert_array_equal(array, np.full(3, 7.75))  # θ, not what the second worker came with


def test_steps_that_are_rejected_are_undone_and_the_next_ones_go_through() -> None:
    line = Line()
    with serving() as live, connect(live.address) as session:
        own = line.own_steps(session)
        own.step(line.train())
        before = theta(live)
        line.variables["bias"].value = np.array([np.nan])
        with pytest.raises(NonFiniteGradient):
            own.step()
        np.testing.assert_array_equal(line.packed, before)
        line.train()
        own.step()
        np.testing.assert_array_equal(line.packed, theta(live))
        assert outcomes(live)["applied"] == 2


def test_steps_of_a_lease_that_has_ended_are_lost_as_a_whole() -> None:
    line = Line()
    with serving(config(Hyperparameters(local_steps=2))) as live, connect(live.address) as session:
        own = line.own_steps(session)
        own.step(line.train())
        expire_all(live)
        session.pull()  # only reads: the steps count from the θ that they began on
        own.step(line.train())
        np.testing.assert_array_equal(theta(live), np.zeros(3))
        np.testing.assert_array_equal(line.packed, np.zeros(3))
        for _ in range(2):
            own.step(line.train())
        assert version(live) == 1
        np.testing.assert_array_equal(line.packed, theta(live))


def test_a_pull_between_two_steps_does_not_move_what_they_are_counted_from() -> None:
    line = Line()
    with (
        serving(config(Hyperparameters(rule="downpour", local_steps=2))) as live,
        connect(live.address) as session,
        connect(live.address) as another,
    ):
        own = line.own_steps(session)
        own.step(line.train())
        another.join({"weight": np.zeros(2), "bias": np.zeros(1)}, optimizer="worker")
        another.commit(np.full(3, 0.5), kind="delta")
        session.pull()
        line.train()
        made = line.packed
        own.step()
        np.testing.assert_allclose(theta(live), made + 0.5, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    line = Line()
    with serving() as live, connect(live.address) as session:
        own = line.own_steps(session)
        with pytest.raises(InvalidRequest, match="loss is a number"):
            own.step("low")
        line.variables["scale"] = Variable(np.ones(1))
        with pytest.raises(LayoutMismatch, match=r"unknown tensors: .'scale'"):
            own.step()
