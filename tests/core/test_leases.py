"""Leases: opened, renewed, ended once, each with its reason."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from gem_api.errors import LeaseEnded
from gem_api.v1 import training_pb2 as pb
from gem_server.core.leases import _REMEMBERED_ENDS, Lease, LeaseTable
from gem_server.core.values import EndReason


def table(duration: float = 10.0) -> LeaseTable:
    numbers = count(1)
    return LeaseTable(duration, lambda: f"lease-{next(numbers)}")


def opened(leases: LeaseTable, worker: str = "ann", now: float = 0.0) -> Lease:
    return leases.open(leases.new_id(), worker, {}, now)


def test_a_gap_of_more_than_half_a_lease_is_a_suspension() -> None:
    leases = table(10.0)
    lease = opened(leases)
    for now, extended in ((0.0, 0.0), (5.0, 0.0), (10.25, 5.25)):
        assert leases.extend_after_suspension(now) == extended
    assert leases.expired(15.0) == []
    assert leases.expired(15.25) == [lease]


def test_a_lease_that_was_renewed_before_the_server_looked_again_gets_no_more_than_its_duration() -> None:
    leases = table(10.0)
    lease = opened(leases)
    leases.extend_after_suspension(0.0)
    leases.renew("lease-1", 1000.0)
    assert leases.extend_after_suspension(1000.0) == 1000.0
    assert lease.expires_at == 1010.0


@pytest.mark.parametrize("reason", EndReason)
def test_an_ended_lease_says_why_it_ended(reason: EndReason) -> None:
    leases = table()
    leases.end(opened(leases), reason)
    for ask in (leases.get, lambda lease_id: leases.renew(lease_id, 0.0)):
        with pytest.raises(LeaseEnded, match=str(reason)) as raised:
            ask("lease-1")
        assert raised.value.reason == reason
    assert leases.named("ann") is None
    assert leases.ended == {reason: 1}


def test_an_unknown_lease_is_refused_without_a_reason() -> None:
    with pytest.raises(LeaseEnded, match="no such lease") as raised:
        table().get("guessed")
    assert raised.value.reason == "unknown"


def test_reasons_are_remembered_for_the_newest_ends_only() -> None:
    """What is remembered is bounded; a lease long gone is refused all the same."""
    leases = table()
    for _ in range(_REMEMBERED_ENDS + 1):
        leases.end(opened(leases), EndReason.LEFT)
    with pytest.raises(LeaseEnded) as raised:
        leases.get("lease-1")
    assert raised.value.reason == "unknown"
    with pytest.raises(LeaseEnded) as raised:
        leases.get("lease-2")
    assert raised.value.reason == EndReason.LEFT
    assert leases.ended == {EndReason.LEFT: _REMEMBERED_ENDS + 1}


def test_the_reasons_are_those_of_the_contract() -> None:
    stated = [value.name.removeprefix("LEASE_END_REASON_").lower() for value in pb.LeaseEndReason.DESCRIPTOR.values]
    assert ["unspecified", *map(str, EndReason)] == stated


def test_the_bytes_held_are_those_of_all_live_leases_whatever_happened() -> None:
    leases = table()
    ann, bob = opened(leases, "ann"), opened(leases, "bob")
    for lease, size in ((ann, 1), (bob, 5)):
        lease.buffers["moment"] = np.zeros(size, np.float32)
        leases.recount(lease)
    assert leases.nbytes == ann.nbytes + bob.nbytes == 4 + 20
    leases.end(ann, EndReason.LEFT)
    assert leases.nbytes == 20
    leases.add(ann)
    assert leases.nbytes == 24
    for lease in (ann, bob):
        leases.end(lease, EndReason.LEFT)
    assert leases.nbytes == 0
