"""What renews a worker's lease, and what the core does with its commits, memory and shards once it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gem_api.errors import InvalidRequest, LayoutMismatch, LeaseEnded
from gem_api.layout import Layout
from gem_server.core.values import EndReason
from kit.core import SMALL, header, make_core, start, uploaded


def test_a_gradient_that_was_still_arriving_takes_no_ticket_once_its_lease_has_ended() -> None:
    core = make_core()
    (ann,) = start(core)
    head = header(core, ann, 1)
    _, lease = core.admit(head, 0.0)
    core.leave(ann)
    with pytest.raises(LeaseEnded):
        core.ticket(lease, head, 0.0, uploaded(core, 1.0))
    assert core.next_ticket == 1


def test_every_sign_of_life_renews_a_lease() -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    head = header(core, ann, 1)
    asks: list[Callable[[float], object]] = [
        lambda now: core.renew(ann, now),
        lambda now: core.pull_decision(ann, now),
        lambda now: core.lease_shard(ann, 10, now),
        lambda now: core.complete_shard(ann, 1, now),
        lambda now: core.admit(head, now),
        lambda now: core.ticket(core.leases.get(ann), head, now, uploaded(core, 1.0)),
    ]
    for number, ask in enumerate(asks, 1):
        ask(9.0 * number)
        assert core.leases.get(ann).expires_at == 9.0 * number + 10


def test_an_ended_lease_frees_its_memory_and_gives_its_shards_back() -> None:
    core = make_core(lease_seconds=10)
    ann, bob = start(core, ["ann", "bob"])
    core.lease_shard(ann, 1000, 0.0)
    core.lease_shard(ann, 1000, 0.0, holding={1})
    core.renew(bob, 5.0)
    held = core.memory.held
    (ended,) = core.expire(10.0)
    assert (ended.lease_id, ended.worker, ended.reason, ended.shards_returned) == (ann, "ann", EndReason.EXPIRED, 2)
    assert core.memory.held == held - core.memory.most_for_worker - 4 * SMALL.size
    assert core.ledger.held == {}
    with pytest.raises(LeaseEnded) as raised:
        core.admit(header(core, ann, 1), 10.0)
    assert raised.value.reason == "expired"


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "a\0", "\x1b[31m"])
def test_a_worker_name_that_could_spoil_a_log_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 128 printable"):
        make_core().register(name, SMALL, 0.0)


# -- if all workers leave


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
