"""Which workers are stalled: they renew their lease, but for long have asked for nothing that training needs."""

from __future__ import annotations

import pytest
from gem_api.errors import LeaseEnded
from gem_server.core.pace import _REMEMBERED, FIRST_STEP_SECONDS, MIN_PAUSE_SECONDS, Pace
from gem_server.core.state_machine import Core
from gem_server.core.values import EndReason
from kit.core import ONES, commit, header, make_core, send, start


def two_commits(core: Core, lease_id: str) -> None:
    """Makes a whole step of a worker known."""
    for sequence in (1, 2):
        commit(core, lease_id, sequence, ONES)


def renewed_until(core: Core, now: float, *leases: str) -> list[tuple[str, EndReason]]:
    for lease in leases:
        core.renew(lease, now)
    return [(ended.worker, ended.reason) for ended in core.expire(now)]


def test_a_worker_that_only_renews_its_lease_is_stalled_after_ten_minutes_and_its_shards_go_back() -> None:
    core = make_core(lease_seconds=10)
    ann, bob = start(core, ["ann", "bob"])
    core.lease_shard(ann, 1000, 0.0)
    two_commits(core, ann)
    assert renewed_until(core, MIN_PAUSE_SECONDS, ann, bob) == []
    assert renewed_until(core, MIN_PAUSE_SECONDS + 1, ann, bob) == [("ann", EndReason.STALLED)]
    assert core.ledger.held == {}
    with pytest.raises(LeaseEnded) as raised:
        core.renew(ann, MIN_PAUSE_SECONDS + 2)
    assert raised.value.reason == "stalled"


def test_before_its_first_commit_a_worker_has_an_hour_to_load_its_data_and_compile() -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    assert renewed_until(core, FIRST_STEP_SECONDS, ann) == []
    assert renewed_until(core, FIRST_STEP_SECONDS + 1, ann) == [("ann", EndReason.STALLED)]


@pytest.mark.parametrize("asks", ["pull_decision", "lease_shard", "complete_shard", "admit", "renew"])
def test_whatever_training_needs_counts_as_progress(asks: str) -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    two_commits(core, ann)
    arguments = {"lease_shard": (ann, 10), "complete_shard": (ann, 1), "admit": (header(core, ann, 3),)}.get(asks, (ann,))
    getattr(core, asks)(*arguments, 500.0, **({"waiting": True} if asks == "renew" else {}))
    assert renewed_until(core, 500.0 + MIN_PAUSE_SECONDS, ann) == []
    assert renewed_until(core, 500.0 + 10 * 500 + 1, ann) == [("ann", EndReason.STALLED)]  # a pause of 500 s is usual here


def test_a_commit_that_waits_or_moves_its_tensors_is_progress_however_long_it_takes() -> None:
    core = make_core(lease_seconds=10)
    ann, bob = start(core, ["ann", "bob"])
    two_commits(core, ann)
    two_commits(core, bob)
    send(core, header(core, ann, 3), ONES)
    core.renew(bob, 9000.0)
    assert core.expire(9000.0, busy=lambda lease_id: lease_id == bob) == []
    assert [ended.worker for ended in core.expire(9000.0)] == ["bob"]


def test_a_worker_that_comes_back_shows_that_its_pause_is_usual_in_this_run() -> None:
    core = make_core(lease_seconds=10)
    ann, bob = start(core, ["ann", "bob"])
    for lease in (ann, bob):
        two_commits(core, lease)
    core.renew(ann, 700.0)
    core.pull_decision(bob, 599.0)
    core.leases.pace.longest = 0.0  # bob's own pause is not what this is about
    assert renewed_until(core, 700.0, ann, bob) == [("ann", EndReason.STALLED)]
    with pytest.raises(LeaseEnded):
        core.admit(header(core, ann, 3), 1599.0)
    assert renewed_until(core, 599.0 + 10 * 1599, bob) == []
    assert renewed_until(core, 600.0 + 10 * 1599, bob) == [("bob", EndReason.STALLED)]


def test_a_long_lease_gives_long_pauses() -> None:
    pace = Pace(lease_seconds=120.0)
    pace.begin("ann", 0.0)
    assert pace.limit("ann") == 120 * 120
    pace.seen("ann", 0.0, committed=True)
    assert pace.limit("ann") == 120 * 120  # of its first step a part alone is known: a server may have restarted meanwhile
    pace.seen("ann", 0.0, committed=True)
    assert pace.limit("ann") == 20 * 120


def test_neither_a_suspended_server_nor_a_restart_makes_a_worker_stalled() -> None:
    core = make_core(lease_seconds=10)
    ann, bob = start(core, ["ann", "bob"])
    two_commits(core, ann)
    core.leases.extend_after_suspension(0.0)
    core.pull_decision(bob, 5000.0)  # before anybody has noticed that it stood still
    core.leases.extend_after_suspension(5000.0)
    assert renewed_until(core, 5000.0 + MIN_PAUSE_SECONDS, ann, bob) == []
    assert core.leases.pace.longest == 0
    core.leave(bob)
    core.mark_restarted(None)
    assert renewed_until(core, 7000.0, ann) == []
    assert renewed_until(core, 7000.0 + FIRST_STEP_SECONDS + 1, ann) == [("ann", EndReason.STALLED)]


@pytest.mark.parametrize(("pause", "usual"), [(5.0, True), (5.25, False)])
def test_a_pause_is_usual_unless_the_server_has_not_looked_for_more_than_half_a_lease(pause: float, usual: bool) -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    core.leases.extend_after_suspension(0.0)
    core.pull_decision(ann, pause)
    assert core.leases.pace.longest == (pause if usual else 0.0)


def test_what_is_kept_of_leases_that_have_ended_or_never_were_is_bounded() -> None:
    pace = Pace(10.0)
    for number in range(_REMEMBERED + 1):
        pace.begin(str(number), 0.0)
        pace.end(str(number), stalled=True)
        pace.seen("guessed", 0.0)
    pace.begin("ann", 0.0)
    pace.seen("ann", 0.0, committed=True)
    pace.end("ann", stalled=False)
    assert (pace._seen, pace._commits, len(pace._stalled)) == ({}, {}, _REMEMBERED)
