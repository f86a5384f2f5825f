"""Leases after a restart: a repeat gets its first answer, a lost commit ends the lease as rolled back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gem_api.errors import LeaseEnded, SequenceGap
from gem_server.core.state_machine import Core
from gem_server.core.values import Admission, EndReason
from kit.core import ONES, bits, commit, header, make_core, start


def as_restored(core: Core) -> None:
    """What a restored core's leases look like."""
    for lease in core.leases.live.values():
        lease.restored = True


def test_a_restored_lease_is_answered_a_repeat_and_goes_on() -> None:
    core = make_core()
    (ann,) = start(core)
    first = commit(core, ann, 1, ONES)
    as_restored(core)
    assert core.admit(header(core, ann, 1), 0.0)[0] is Admission.REPEATED
    assert core.leases.get(ann).last_applied is first
    assert commit(core, ann, 2, ONES).version == 2
    with pytest.raises(SequenceGap):  # it has committed since: a gap is a bug again
        core.admit(header(core, ann, 9), 0.0)


@pytest.mark.parametrize("change", [{"sequence": 3}, {"base_version": 5}], ids=["later sequence", "later base"])
def test_a_restored_lease_that_lacks_acknowledged_commits_ends_rolled_back(change: dict[str, Any]) -> None:
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES)
    as_restored(core)
    theta = bits(core.central.theta)
    with pytest.raises(LeaseEnded, match="without this worker's last commit") as raised:
        core.admit(replace(header(core, ann, 2), **change), 0.0)
    assert raised.value.reason == "rolled_back"
    assert list(core.leases.live) == [bob]
    assert core.leases.ended == {EndReason.ROLLED_BACK: 1}
    assert bits(core.central.theta) == theta


def test_leases_that_ended_rolled_back_are_told_of_once() -> None:
    """Whoever asked the core to admit the commit must tell the others: their calls, the status, the log."""
    core = make_core()
    (ann,) = start(core)
    core.lease_shard(ann, 1000, 0.0)
    as_restored(core)
    with pytest.raises(LeaseEnded):
        core.admit(header(core, ann, 5), 0.0)
    (ended,) = core.pop_ended_leases()
    assert (ended.lease_id, ended.reason, ended.shards_returned) == (ann, EndReason.ROLLED_BACK, 1)
    assert core.pop_ended_leases() == []


def test_a_restored_lease_that_sends_an_old_sequence_is_a_bug_not_a_rollback() -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES)
    commit(core, ann, 2, ONES)
    as_restored(core)
    with pytest.raises(SequenceGap):
        core.admit(header(core, ann, 1), 0.0)
    assert ann in core.leases.live
