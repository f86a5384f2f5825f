"""A worker whose session renews the lease while its own thread stands still loses its lease, and says where it stands."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

import pytest
from gem_api.errors import LeaseEnded
from gem_client import Session, connect
from gem_server.core.pace import MIN_PAUSE_LEASES
from gem_server.core.values import EndReason
from kit.model import GRADIENT, in_background, model
from kit.server import Live, config, serving, wait_until


def pause(live: Live, session: Session, share: float) -> None:
    """Moves the clock by this share of what a pause may take; the session renews its lease meanwhile, as it would by itself."""
    for _ in range(math.ceil(share * MIN_PAUSE_LEASES / 0.9)):
        session._member.links.leader.connection.renew()
        wait_until(lambda: live.on_loop(lambda: renewed(live)), "the renewal to arrive")
        live.clock.advance(0.9 * live.config.lease_seconds)


def renewed(live: Live) -> bool:
    (lease,) = live.core.leases.live.values()
    return bool(lease.expires_at - live.clock() > 0.95 * live.config.lease_seconds)


def knows_of_its_end(session: Session) -> bool:
    with suppress(LeaseEnded):
        session._member.links.leader.connection.renew()
    return session.stalled


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_worker_that_hangs_loses_its_lease_and_says_where_it_stands(
    shared_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def hang_in_the_users_code() -> None:
        release.wait()

    with serving(config()) as live, connect(live.address, name="ann", shared_memory=shared_memory) as session:
        session.join(model())
        for _ in range(2):
            session.commit(GRADIENT)
        list(zip(session.shards(10), range(1), strict=False))
        hanging = in_background(hang_in_the_users_code)
        pause(live, session, 1.1)
        live.on_loop(live.server.wiring.training.expire_leases)
        wait_until(lambda: knows_of_its_end(session), "the session to renew the lease")
        assert live.on_loop(lambda: dict(live.core.leases.ended)) == {EndReason.STALLED: 1}
        assert live.on_loop(lambda: dict(live.core.ledger.held)) == {}
        (line,) = [record.getMessage() for record in caplog.records if "asked for nothing" in record.getMessage()]
        assert "hang_in_the_users_code" in line

        release.set()
        hanging.result()
        assert session.commit(GRADIENT).lost
        assert not session.stalled
        assert session.commit(GRADIENT).version == 3


def test_a_worker_that_waits_for_a_server_says_so_with_its_renewals() -> None:
    """The server can't write its log, for example, or one of several servers is away."""
    with serving(config()) as live, connect(live.address, name="ann") as session:
        session.join(model())
        for _ in range(2):
            session.commit(GRADIENT)
        with session._caller.standing.calling():
            pause(live, session, 1.5)
        live.on_loop(live.server.wiring.training.expire_leases)
        assert session.commit(GRADIENT).version == 3
