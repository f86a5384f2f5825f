"""Who gives θ its first value, whoever leaves or dies before that."""

from __future__ import annotations

import pytest
from gem_api.errors import InvalidRequest, LayoutMismatch, LeaseEnded, NotInitialized
from gem_api.layout import Layout
from gem_server.core.state_machine import Core
from gem_server.core.values import EndReason, PullDecision
from kit.core import SMALL, header, make_core, start


def initializers(core: Core) -> list[str]:
    """The leases that are asked for the first value now."""
    asked = PullDecision.INITIALIZE
    return [lease_id for lease_id in core.leases.live if core.pull_decision(lease_id, 0.0) is asked]


def test_the_first_worker_alone_is_asked_for_the_first_value() -> None:
    core = make_core()
    registrations = [core.register(worker, SMALL, 0.0) for worker in ("ann", "bob", "cy")]
    assert [registration.must_initialize for registration in registrations] == [True, False, False]
    assert initializers(core) == ["lease-1"]
    assert core.pull_decision("lease-2", 0.0) is PullDecision.WAIT


def test_when_the_initialiser_dies_half_way_the_oldest_one_left_is_asked() -> None:
    core = make_core(lease_seconds=10)
    for worker in ("ann", "bob", "cy"):
        core.register(worker, SMALL, 0.0)
    core.require_initializer("lease-1", 0.0)
    core.central.theta[:3] = 7  # half of it had arrived
    core.renew("lease-2", 5.0)
    core.renew("lease-3", 5.0)
    core.expire(10.0)
    assert initializers(core) == ["lease-2"]
    with pytest.raises(LeaseEnded):
        core.require_initializer("lease-1", 10.0)
    with pytest.raises(InvalidRequest, match="not asked"):
        core.require_initializer("lease-3", 10.0)
    assert not core.central.initialized


@pytest.mark.parametrize("end", ["leave", "expire", "replace"])
def test_there_is_always_exactly_one_initialiser_while_there_are_workers(end: str) -> None:
    core = make_core(lease_seconds=10)
    for worker in ("ann", "bob"):
        core.register(worker, SMALL, 0.0)
    if end == "leave":
        core.leave("lease-1")
    elif end == "expire":
        core.renew("lease-2", 9.0)
        core.expire(10.0)
    else:
        core.register("ann", SMALL, 0.0)
    assert initializers(core) == ["lease-2"]


def test_once_initialised_nobody_is_asked_again() -> None:
    core = make_core()
    start(core, ["ann", "bob"])
    core.leave("lease-1")
    assert initializers(core) == []
    assert core.pull_decision("lease-2", 0.0) is PullDecision.READY
    assert not core.register("cy", SMALL, 0.0).must_initialize
    with pytest.raises(InvalidRequest, match="pull the parameters instead"):
        core.require_initializer("lease-2", 0.0)


def test_when_all_leave_before_the_first_value_the_next_worker_may_bring_another_model() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    core.leave("lease-1")
    assert core.register("bob", Layout.of({"other": (4,)}), 0.0).must_initialize
    assert core.central.size == 4


def test_a_lone_worker_may_come_back_with_another_model_before_the_first_value() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    assert core.register("ann", Layout.of({"other": (4,)}), 0.0).must_initialize
    assert core.central.size == 4
    with pytest.raises(LayoutMismatch):  # but not past another worker
        core.register("bob", SMALL, 0.0)
    core.register("bob", Layout.of({"other": (4,)}), 0.0)
    with pytest.raises(LayoutMismatch):
        core.register("ann", SMALL, 0.0)


def test_when_all_leave_after_the_first_value_theta_stays() -> None:
    core = make_core()
    (lease,) = start(core, theta=3.0)
    core.leave(lease)
    core.register("bob", SMALL, 0.0)
    core.pull(core.leases.get("lease-2"))
    assert (core.reply(core.leases.get("lease-2")) == 3).all()
    with pytest.raises(LayoutMismatch):
        core.register("cy", Layout.of({"other": (4,)}), 0.0)


def test_a_lone_worker_that_restarts_before_the_first_value_is_asked_again() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    registration = core.register("ann", SMALL, 0.0)
    assert registration.must_initialize
    assert registration.ended is not None
    assert registration.ended.reason is EndReason.REPLACED
    assert initializers(core) == ["lease-2"]


def test_nothing_is_committed_before_the_first_value() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    with pytest.raises(NotInitialized):
        core.admit(header(core, "lease-1", 1), 0.0)
