"""Memory that a session shares with the server, also when leases end and servers come and go: nothing is lost, applied twice or
left behind. That results are the same: `test_same_bits.py`."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace
from pathlib import Path

import gem_client
import numpy as np
import pytest
from gem_api.region import region_bytes
from gem_client import InvalidRequest, Session, connect
from kit.model import (
    GRADIENT,
    PLAIN,
    SIZE,
    Patience,
    assert_goes_over_the_network,
    expire_all,
    in_background,
    model,
    theta,
    traffic,
)
from kit.regions import abstract, linux_only, mapped, region_at, until_held
from kit.server import DEADLINE, Live, config, serving, wait_until

pytestmark = [linux_only, pytest.mark.shared_memory]


# -- what is sent, and whose region is whose


def test_commits_by_reference_send_no_tensors() -> None:
    large = np.zeros(200_000, np.float32)
    with serving(config(memory_socket=abstract())) as live, connect(live.address) as session:
        session.join({"w": large})
        before = traffic(live)
        for _ in range(3):
            session.commit(large)
        after = traffic(live)
        assert max(after[0] - before[0], after[1] - before[1]) < 1000


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
        assert near.memory_bytes == distant.memory_bytes + region_bytes(SIZE)
        arrives = 4 * SIZE  # where the gradients of the distant one do
        assert admin.status().memory_bytes == 4 * SIZE + near.memory_bytes + distant.memory_bytes + arrives


# -- leases that end, sessions that close


def test_after_the_lease_has_ended_there_is_a_new_region_and_the_old_one_goes(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    old = region_at(session.theta)
    buffers = session.theta, session.gradient
    expire_all(live)
    answer = session.commit(GRADIENT)
    assert (answer.lost, session.generation, session.shares_memory) == (True, 2, True)
    assert session.theta is answer.theta
    assert session.theta is not buffers[0]
    assert session.gradient is not buffers[1]
    np.testing.assert_array_equal(answer.theta, theta(live))
    after = session.commit(GRADIENT)
    assert (after.lost, after.version) == (False, 2)
    np.testing.assert_array_equal(after.theta, theta(live))
    del buffers
    gc.collect()
    live.on_loop(live.server.wiring.lane.regions.take_back)  # the server itself does so once a second
    until_held(old, 0)


def test_theta_may_be_read_after_the_session_is_closed(live: Live) -> None:
    """The memory stays as long as someone looks at it."""
    with connect(live.address) as session:
        session.join(model())
        last = session.commit(GRADIENT).theta
    np.testing.assert_array_equal(last, theta(live))
    with pytest.raises(InvalidRequest):
        session.commit(GRADIENT)


# -- a server that goes and comes back


@pytest.mark.parametrize("place", ["another socket", "no socket", "no room"])
def test_the_gradient_in_the_region_reaches_a_server_that_comes_back(place: str, tmp_path: Path) -> None:
    """By a new region, or, if it shares none now, over the network."""
    patience, gradient = Patience(), np.arange(SIZE, dtype=np.float32)
    expected = np.array([0.75] * 6 + [-0.25] * 3, np.float32) - np.float32(0.5) * gradient
    with serving(config(PLAIN, checkpoint_dir=tmp_path, memory_socket=abstract())) as live:
        session = connect(live.address, retry=patience.retry())
        session.join(model())
        session.commit(GRADIENT)
        session.gradient[:] = gradient
        live.stop()
        waiting = in_background(lambda: session.commit(session.gradient))
        wait_until(lambda: patience.pauses, "the session to try again")
    socket = "" if place == "no socket" else abstract()
    limit = 4 * SIZE * (1 + 2 + 2) - 1 if place == "no room" else 0
    again = replace(live.config, listen=live.address, resume=True, memory_socket=socket, memory_limit=limit)
    with serving(again) as back, session:
        answer = waiting.result(DEADLINE)
        assert (answer.lost, answer.version, session.generation) == (False, 2, 1)
        np.testing.assert_array_equal(answer.theta, expected)
        np.testing.assert_array_equal(theta(back), expected)
        if place != "another socket":
            assert_goes_over_the_network(back, session)
            return
        assert session.shares_memory
        assert answer.theta is session.theta
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, expected - 0.25)
        assert region_at(session.theta) == region_at(session.gradient)


def test_the_region_of_a_server_that_is_gone_does_not_wait_for_the_garbage_collector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be hundreds of megabytes, and a loop that makes no garbage may never call for the collector."""
    caplog.set_level(logging.CRITICAL, "gem_client")  # a captured record would keep the error, and that its frames
    with serving(config(PLAIN, checkpoint_dir=tmp_path, memory_socket=abstract())) as live:
        session = connect(live.address, retry=Patience().retry())
        session.join(model())
        session.commit(GRADIENT)
        old, again = region_at(session.theta), replace(live.config, listen=live.address, resume=True)
    del live
    until_held(old, 1)  # the session's own
    gc.disable()
    try:
        with serving(again), session:
            assert not session.commit(GRADIENT).lost
            assert region_at(session.theta) != old
            assert old not in mapped(os.getpid())
    finally:
        gc.enable()
