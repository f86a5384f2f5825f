"""Signs of life on a lane: they keep a lease as `RenewLease` does, and a session's own take the lane if it is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gem_api.v1 import lane_pb2
from gem_client import Session, connect
from kit.model import GRADIENT, Patience, Wire, in_background, model, version
from kit.raw_client import Worker
from kit.raw_lane import RENEW, RawLane, committed, message, opened, opened_in_memory
from kit.regions import linux_only
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.ways import all_lanes

pytestmark = pytest.mark.shared_memory  # the server has both kinds of lane
SIGN = message(RENEW, lane_pb2.LaneRenewal().SerializeToString())


def lane_of(worker: Worker, way: str) -> RawLane:
    return opened(worker) if way == "tcp" else opened_in_memory(worker)


def left(live: Live) -> float:
    """Seconds until the only lease ends."""
    (expires_at,) = live.on_loop(lambda: [lease.expires_at for lease in live.core.leases.live.values()])
    return float(expires_at - live.clock())


@contextmanager
def about_to_expire(live: Live) -> Iterator[None]:
    """Advances the clock; expects that the block renews the lease."""
    live.clock.advance(0.6 * live.config.lease_seconds)
    assert left(live) < 0.5 * live.config.lease_seconds
    yield
    wait_until(lambda: left(live) > 0.9 * live.config.lease_seconds, "the sign of life to arrive")


@all_lanes
def test_signs_of_life_on_a_lane_keep_its_lease_and_bring_no_reply(way: str, live: Live, worker: Worker) -> None:
    with lane_of(worker, way) as lane:
        for _ in range(5):
            with about_to_expire(live):
                lane.send(SIGN)
        live.on_loop(live.server.wiring.training.expire_leases)
        lane.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            lane.sock.recv(1)


@all_lanes
def test_several_signs_of_life_and_a_commit_may_come_in_one_piece(way: str, live: Live, worker: Worker) -> None:
    with lane_of(worker, way) as lane:
        lane.send(3 * SIGN + SIGN[:7])
        lane.send(SIGN[7:])
        assert committed(worker, lane)[0].version == 1
        with about_to_expire(live):
            lane.send(SIGN)


@all_lanes
def test_a_sign_of_life_with_a_payload_is_refused(way: str, live: Live, worker: Worker) -> None:
    with lane_of(worker, way) as lane:
        lane.send(message(RENEW, b"", 8), bytes(8))
        assert lane.refusal().error == "INVALID_REQUEST"


@all_lanes
def test_a_sign_of_life_of_a_lease_that_has_ended_is_told_so(way: str, live: Live, worker: Worker) -> None:
    with lane_of(worker, way) as lane:
        live.on_loop(lambda: live.core.leave(worker.lease_id))
        lane.send(SIGN)
        assert lane.refusal().error == "LEASE_ENDED"


# -- the session's


@contextmanager
def trained(live: Live, shared_memory: bool) -> Iterator[tuple[Wire, Session]]:
    """A session with one commit, behind a network that can be broken."""
    with (
        Wire(live.address, live) as wire,
        connect(wire.address, shared_memory=shared_memory, retry=Patience().retry()) as session,
    ):
        session.join(model())
        session.commit(GRADIENT)
        yield wire, session


@linux_only
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_session_renews_on_its_lane(shared_memory: bool, tmp_path: Path) -> None:
    with serving(config(memory_socket=str(tmp_path / "s"))) as live, trained(live, shared_memory) as (wire, session):
        assert session.shares_memory == shared_memory
        wire.grpc.refuse()
        for _ in range(3):
            with about_to_expire(live):
                session._member.links.leader.connection.renew()


def test_a_session_renews_over_grpc_while_its_lane_is_in_use_or_broken() -> None:
    with serving(config()) as live, trained(live, False) as (wire, session):
        (lane,) = wire.lanes
        lane.lose_answers()
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: version(live) == 2, "the commit to be applied")
        with about_to_expire(live):
            session._member.links.leader.connection.renew()
        lane.cut()
        assert waiting.result(DEADLINE).version == 2
        lane.refuse()
        with about_to_expire(live):
            session._member.links.leader.connection.renew()
        assert session.commit(GRADIENT).version == 3
