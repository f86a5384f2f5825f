"""The lane, spoken by a client that was written from docs/lane.md with `socket` and `struct` alone."""

from __future__ import annotations

import numpy as np
import pytest
from kit.raw_client import Worker, wired
from kit.raw_lane import committed, header, hello, offer, opened, opened_in_memory, tcp
from kit.regions import abstract
from kit.server import Live, config, serving


def test_commits_over_tcp_give_the_same_theta_as_over_grpc(live: Live, worker: Worker) -> None:
    with opened(worker) as lane:
        first, theta = committed(worker, lane, 1.0)
        assert (first.sequence, first.version, first.staleness) == (1, 1, 0)
        over_grpc, again = worker.commit(1.0)
        assert (over_grpc.sequence, over_grpc.version) == (2, 2)
        third, _ = committed(worker, lane, 1.0)
        assert third.sequence == 3
        assert (theta != again).all()
    status = worker.wire.status()
    assert (status.version, status.workers[0].transport) == (3, "tcp")


def test_commits_through_memory() -> None:
    with serving(config(memory_socket=abstract())) as live, wired(live) as wire:
        worker = wire.started("worker")
        with opened_in_memory(worker) as lane:
            result, theta = committed(worker, lane, 1.0)
            assert result.version == 1
            np.testing.assert_array_equal(theta, wire.pull(worker.size)[1])
            assert wire.status().workers[0].transport == "memory"


def test_a_token_opens_one_lane(live: Live, worker: Worker) -> None:
    offered = offer(worker)
    with tcp(offered.port) as lane, tcp(offered.port) as second:
        lane.hello(offered.token)
        second.send(hello(offered.token))
        assert second.refusal().error == "INVALID_REQUEST"
        assert committed(worker, lane)[0].version == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e30])
def test_a_gradient_that_is_no_number_is_refused_and_changes_nothing(live: Live, worker: Worker, value: float) -> None:
    before = worker.wire.pull(worker.size)[1]
    with opened(worker) as lane:
        gradient = worker.gradient(0.0)
        gradient[5] = value
        lane.commit(header(worker), gradient.tobytes())
        assert lane.refusal().error == "NON_FINITE_GRADIENT"
    np.testing.assert_array_equal(worker.wire.pull(worker.size)[1], before)
    with opened(worker) as lane:
        assert committed(worker, lane)[0].version == 1


def test_a_newer_lane_of_the_lease_ends_the_older_one(live: Live, worker: Worker) -> None:
    with opened(worker) as older, opened(worker) as newer:
        assert older.refusal().error == "SUPERSEDED"
        assert committed(worker, newer)[0].version == 1


def test_bytes_that_are_no_message_are_refused(live: Live, worker: Worker) -> None:
    with tcp(offer(worker).port) as lane:
        lane.send(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")
        assert lane.refusal().error == "INVALID_REQUEST"
