"""A session's lease: renewed in the background; once it has ended, the session opens another and drops one gradient."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gem_client import LeaseEnded, Session, connect
from gem_client.transport.connection import Connection
from kit.model import GRADIENT, Patience, ended, expire_all, model, theta, version
from kit.server import Live, config, serving, wait_until


def one_lease(live: Live) -> Any:
    """The server's only lease."""
    (lease,) = live.core.leases.live.values()
    return lease


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
            assert session.commit(GRADIENT).lost
            until = back.on_loop(lambda: one_lease(back).expires_at)
            wait_until(
                lambda: ended(back) or back.on_loop(lambda: one_lease(back).expires_at) > until,
                "the lease to be renewed or end",
            )
            assert ended(back) == {}


@pytest.mark.usefixtures("transport")
def test_after_the_lease_has_ended_the_next_gradient_is_dropped_and_theta_is_fresh(live: Live, session: Session) -> None:
    session.commit(GRADIENT)
    expire_all(live)
    with connect(live.address) as other:
        other.join(model())
        other.commit(GRADIENT)
    answer = session.commit(GRADIENT)
    assert answer.lost
    assert (answer.version, version(live), session.generation) == (2, 2, 2)
    np.testing.assert_array_equal(answer.theta, theta(live))
    after = session.commit(GRADIENT)
    assert (after.lost, after.version, after.staleness) == (False, 3, 0)


def test_pull_after_the_lease_has_ended_enters_again_and_the_next_commit_counts(live: Live, session: Session) -> None:
    expire_all(live)
    session.pull()
    assert session.generation == 2
    assert not session.commit(GRADIENT).lost


def test_a_gradient_computed_under_an_earlier_lease_is_dropped(live: Live, session: Session) -> None:
    expire_all(live)
    session._member.lease_shard(10, ())  # enters again, while the caller still has the θ of the first lease
    assert session.generation == 2
    assert session.commit(GRADIENT).lost
    assert version(live) == 0
    assert not session.commit(GRADIENT).lost


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
