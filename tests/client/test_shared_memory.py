"""The SDK's session with memory shared with the server. That results are the same: `test_same_bits.py`."""

from __future__ import annotations

import gem_client
import numpy as np
import pytest
from gem_api.region import region_bytes
from gem_client import Session, connect
from kit.model import GRADIENT, PLAIN, SIZE, model, theta, traffic
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving

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
