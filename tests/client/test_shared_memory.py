"""The SDK's session with memory shared with the server: bit for bit the same results as over the network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import gem_client
import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.region import region_bytes
from gem_client import Session, connect
from kit.model import GRADIENT, PLAIN, SIZE, Array, model, theta, traffic
from kit.regions import RULES, abstract, linux_only
from kit.server import Live, config, serving

pytestmark = [linux_only, pytest.mark.shared_memory]


# -- the same results


def script(workers: int, steps: int, size: int) -> list[tuple[int, Array | None]]:
    """Which worker does what next: commits this gradient, or pulls."""
    dice = np.random.default_rng(11)
    turns = []
    for _ in range(steps):
        gradient = dice.standard_normal(size, np.float32) if dice.random() < 0.8 else None
        turns.append((int(dice.integers(workers)), gradient))
    return turns


def played(
    settings: Hyperparameters, first: Array, turns: list[tuple[int, Array | None]], shared: list[bool]
) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Plays a script with workers that share memory or do not.

    Returns:
        For every turn the version, the staleness and the bits of the θ that it brought; and the bits of the last θ.
    """
    brought = []
    with serving(config(settings, memory_socket=abstract())) as live, ExitStack() as sessions:
        crew = [sessions.enter_context(connect(live.address, shared_memory=share)) for share in shared]
        for worker in crew:
            worker.join({"w": first})
        assert [worker.shares_memory for worker in crew] == shared
        for number, gradient in turns:
            worker = crew[number]
            if gradient is None:
                brought.append((worker.version, 0, worker.pull().tobytes()))
            else:
                answer = worker.commit(gradient)
                brought.append((answer.version, answer.staleness, answer.theta.tobytes()))
        return brought, theta(live).tobytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [5, 1025, 300_007])
def test_a_run_by_reference_is_bit_for_bit_the_run_over_the_network(rule: str, size: int) -> None:
    """Several workers, their commits interleaved, pulls in between; below a page, across two, and in the apply thread."""
    first = np.random.default_rng(5).standard_normal(size, np.float32)
    turns = script(workers=3, steps=40 if size < 100_000 else 16, size=size)
    over_the_network = played(RULES[rule], first, turns, shared=[False, False, False])
    assert played(RULES[rule], first, turns, shared=[True, True, True]) == over_the_network
    assert played(RULES[rule], first, turns, shared=[True, False, True]) == over_the_network


@pytest.mark.parametrize("gradient_dtype", ["bfloat16", "int8"])
def test_a_format_for_the_network_changes_nothing_by_reference(gradient_dtype: str) -> None:
    gradients = np.random.default_rng(1).standard_normal((3, SIZE), np.float32)
    with serving(config()) as other, connect(other.address) as twin:
        twin.join(model())
        expected = [twin.commit(gradient).theta.tolist() for gradient in gradients]
    with (
        serving(config(memory_socket=abstract())) as live,
        connect(live.address, gradient_dtype=gradient_dtype, theta_dtype="bfloat16") as session,
    ):
        session.join(model())
        assert [session.commit(gradient).theta.tolist() for gradient in gradients] == expected
        np.testing.assert_array_equal(theta(live), expected[-1])


def test_commits_by_reference_send_no_tensors(live: Live, session: Session) -> None:
    before = traffic(live)
    for _ in range(10):
        session.commit(GRADIENT)
    after = traffic(live)
    assert max(after[0] - before[0], after[1] - before[1]) < 10 * 200
    big = np.zeros(200_000, np.float32)
    with serving(config(memory_socket=abstract())) as other, connect(other.address) as large:
        large.join({"w": big})
        before = traffic(other)
        for _ in range(3):
            large.commit(big)
        after = traffic(other)
        assert max(after[0] - before[0], after[1] - before[1]) < 1000


def test_large_models_of_several_workers_stay_apart(live: Live) -> None:
    """Each has its own region: what one writes is no other's gradient or answer."""
    with serving(config(PLAIN, memory_socket=abstract())) as live, ExitStack() as sessions:
        crew = [sessions.enter_context(connect(live.address)) for _ in range(4)]
        for worker in crew:
            worker.join({"w": np.zeros(5000)})
        for number, worker in enumerate(crew):
            worker.gradient[:] = number
        for number, worker in enumerate(crew):
            before = theta(live)
            np.testing.assert_array_equal(worker.commit(worker.gradient).theta, before - 0.5 * number)


# -- what the caller gives and gets


def test_theta_and_gradient_lie_in_the_region(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    region = live.on_loop(lambda: next(iter(live.core.leases.live.values())).region)
    session.gradient[:] = 3.0
    session.theta[:] = 4.0
    assert (region.gradient == 3.0).all()
    assert (region.theta == 4.0).all()


def test_the_gradient_buffer_is_committed_as_it_stands() -> None:
    with serving(config(PLAIN, memory_socket=abstract())) as live, connect(live.address) as session:
        session.join(model())
        session.gradient[:] = np.arange(SIZE)
        buffer = session.gradient
        answer = session.commit(session.gradient)
        np.testing.assert_array_equal(answer.theta, [1 - 0.5 * i for i in range(6)] + [-0.5 * i for i in range(6, 9)])
        assert session.gradient is buffer
        assert answer.theta is session.theta


GRADIENTS: dict[str, Callable[[Session], Any]] = {
    "mapping": lambda session: {"b": np.full(3, 2.0), "w": np.full((2, 3), 1.0)},
    "float64": lambda session: np.array([1.0] * 6 + [2.0] * 3),
    "float16": lambda session: np.array([1.0] * 6 + [2.0] * 3, np.float16),
    "list": lambda session: [1.0] * 6 + [2.0] * 3,
    "big-endian": lambda session: np.array([1.0] * 6 + [2.0] * 3, ">f4"),
    "not contiguous": lambda session: np.repeat(np.array([1.0] * 6 + [2.0] * 3, np.float32), 2)[::2],
    "read-only": lambda session: np.frombuffer(np.array([1.0] * 6 + [2.0] * 3, np.float32).tobytes(), np.float32),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_of_any_kind_is_taken(kind: str) -> None:
    with serving(config(PLAIN, memory_socket=abstract())) as live, connect(live.address) as session:
        session.join(model())
        np.testing.assert_array_equal(session.commit(GRADIENTS[kind](session)).theta, [0.5] * 6 + [-1.0] * 3)


def test_views_of_the_gradient_buffer_itself_are_taken_for_what_they_show() -> None:
    with serving(config(PLAIN, memory_socket=abstract())) as live, connect(live.address) as session:
        first = session.join({"w": np.zeros(5)}).copy()
        session.gradient[:] = [2, 4, 6, 8, 10]
        np.testing.assert_array_equal(session.commit(session.gradient[::-1]).theta, first - [5, 4, 3, 2, 1])
        session.gradient[:] = [2, 4, 6, 8, 10]
        split = session.layout.split(session.gradient)
        np.testing.assert_array_equal(session.commit(split).theta, first - [6, 6, 6, 6, 6])


def test_theta_itself_can_be_the_gradient() -> None:
    """Weight decay, say: the region's other half."""
    with serving(config(PLAIN, memory_socket=abstract())) as live, connect(live.address) as session:
        session.join({"w": np.full(5, 8.0)})
        np.testing.assert_array_equal(session.commit(session.theta).theta, np.full(5, 4.0))
        np.testing.assert_array_equal(session.commit(session.theta).theta, np.full(5, 2.0))


def test_the_callers_own_array_is_left_alone_and_may_be_reused(session: Session) -> None:
    gradient = np.ones(SIZE, np.float32)
    answer = session.commit(gradient)
    np.testing.assert_array_equal(gradient, np.ones(SIZE))
    kept = answer.theta.copy()
    gradient[:] = np.nan
    np.testing.assert_array_equal(session.theta, kept)


def test_what_the_caller_does_to_theta_does_not_reach_the_server(live: Live, session: Session) -> None:
    with serving(config()) as other, connect(other.address) as twin:
        twin.join(model())
        for _ in range(3):
            session.theta[:] = np.nan
            twins = twin.commit(GRADIENT).theta
            np.testing.assert_array_equal(session.commit(GRADIENT).theta, twins)
            np.testing.assert_array_equal(theta(live), twins)


def test_a_session_that_only_reads_has_no_region(live: Live, session: Session) -> None:
    with connect(live.address) as reader:
        np.testing.assert_array_equal(reader.pull(), theta(live))
        assert not reader.shares_memory


def test_the_status_shows_who_shares_memory_and_what_it_costs(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    with connect(live.address, name="far", shared_memory=False) as far, gem_client.Admin(live.address) as admin:
        far.join(model())
        far.commit(GRADIENT)
        near, distant = admin.status().workers
        assert (near.transport, distant.transport) == ("memory", "tcp")
        assert near.memory_bytes == distant.memory_bytes - 4 * SIZE + region_bytes(SIZE)
        assert admin.status().memory_bytes == 4 * SIZE + near.memory_bytes + distant.memory_bytes
