"""How long a worker's steps take, by the server's clock: what counts as a step, and what does not."""

from __future__ import annotations

import random

import pytest
from gem_server.core.moving_mean import LONGEST, MEMORY
from gem_server.core.timetable import Timetable
from kit.core import ONES, SMALL, apply, commit, header, make_core, send, start


def steps(timetable: Timetable, lease: str, times: list[float], now: float = 0.0, share: float = 1.0) -> float:
    """Steps of these lengths, one after the other. Returns the time at the end."""
    for seconds in times:
        timetable.began(lease, now, share)
        timetable.arrived(lease, now := now + seconds, share)
    return now


def test_the_first_step_does_not_count_and_the_next_is_the_pace() -> None:
    timetable = Timetable()
    now = steps(timetable, "ann", [60.0])
    assert timetable.pace("ann") is None
    assert timetable.step("ann") is None
    steps(timetable, "ann", [2.0], now)
    assert timetable.pace("ann") == 2.0


def test_the_pace_is_a_moving_mean_for_a_whole_batch() -> None:
    timetable = Timetable()
    now = steps(timetable, "ann", [9.0, 2.0])
    steps(timetable, "ann", [2.0], now, share=0.5)
    assert timetable.pace("ann") == 2.0 + MEMORY * 2.0
    assert timetable.step("ann") == (2.0 + MEMORY * 2.0) / 2


def test_a_pause_counts_as_a_few_steps_at_most() -> None:
    timetable = Timetable()
    steps(timetable, "ann", [9.0, 2.0, 3600.0])
    assert timetable.pace("ann") == pytest.approx(2.0 + MEMORY * (LONGEST - 1) * 2.0)


def test_a_step_that_took_no_time_is_none() -> None:
    """As all that a log tells does."""
    timetable = Timetable()
    steps(timetable, "ann", [9.0, 0.0, 0.0, 2.0])
    assert timetable.pace("ann") == 2.0


def test_the_fastest_follows_every_step_and_every_end() -> None:
    timetable, choose, workers = Timetable(), random.Random(3), "abcde"
    for now in range(0, 6000, 10):
        worker = choose.choice(workers)
        if choose.random() < 0.05:
            timetable.end(worker)
        else:
            steps(timetable, worker, [choose.choice([1.0, 2.0, 4.0])], now)
        paces = [pace for each in workers if (pace := timetable.pace(each)) is not None]
        assert timetable.fastest == min(paces, default=None)


def test_a_commit_is_expected_a_step_after_the_reply_and_not_while_the_server_has_it() -> None:
    timetable = Timetable()
    now = steps(timetable, "ann", [9.0, 4.0])
    assert list(timetable.expected()) == []
    timetable.began("ann", now, 0.5)
    assert list(timetable.expected()) == [now + 2.0]


# -- in the core


def test_waiting_in_the_queue_is_no_part_of_a_step() -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES, now=100.0)
    waiting = send(core, header(core, ann, 2), ONES, now=103.0)
    apply(core, waiting, now=150.0)
    commit(core, ann, 3, ONES, now=157.0)
    assert core.leases.timetable.pace(ann) == pytest.approx(7.0)  # the one before was its first that is known from its begin


def test_a_worker_that_overlaps_computes_on_while_its_commit_waits() -> None:
    core = make_core()
    lease = core.register("ann", SMALL, 0.0, overlap=True).lease_id
    core.central.theta[:] = 0
    core.initialized()
    core.pull(core.leases.get(lease))
    for sequence, arrives, finished in ((1, 10.0, 19.0), (2, 20.0, 29.0), (3, 30.0, 39.0)):
        apply(core, send(core, header(core, lease, sequence), ONES, now=arrives), now=finished)
    assert core.leases.timetable.pace(lease) == 10.0


def test_a_pull_begins_a_step() -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES, now=100.0)
    commit(core, ann, 2, ONES, now=200.0)
    core.pull_decision(ann, 290.0)
    commit(core, ann, 3, ONES, now=295.0)
    assert core.leases.timetable.pace(ann) == 5.0


def test_time_in_which_the_server_stood_still_is_nobodys() -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    core.leases.extend_after_suspension(0.0)
    for sequence, now in ((1, 1.0), (2, 2.0), (3, 4.0)):
        commit(core, ann, sequence, ONES, now=now)
        core.leases.extend_after_suspension(now)
    assert core.leases.extend_after_suspension(1004.0)
    commit(core, ann, 4, ONES, now=1006.0)
    assert core.leases.timetable.pace(ann) == pytest.approx(2.0)
    core.leases.extend_after_suspension(1006.0)
    commit(core, ann, 5, ONES, now=9000.0)  # it arrives before anybody has noticed
    assert core.leases.timetable.pace(ann) == pytest.approx(2.0)


def test_a_rejoin_and_a_restart_begin_anew() -> None:
    core = make_core()
    (ann,) = start(core)
    for sequence, now in ((1, 1.0), (2, 2.0), (3, 4.0)):
        commit(core, ann, sequence, ONES, now=now)
    assert core.leases.timetable.pace(ann) is not None
    again = core.register("ann", SMALL, 5.0).lease_id
    assert core.leases.timetable.pace(again) is core.leases.timetable.pace(ann) is None
    core.pull(core.leases.get(again))
    for sequence, now in ((1, 6.0), (2, 7.0), (3, 9.0)):
        commit(core, again, sequence, ONES, now=now)
    core.mark_restarted(None)
    assert core.leases.timetable.pace(again) is None
