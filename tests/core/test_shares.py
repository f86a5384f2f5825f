"""Batches as large as workers are fast: which share each worker is given, what a commit counts, and what is counted."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import pairwise
from random import Random
from statistics import mean

import pytest
from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import factor
from gem_server.core.shares import Shares
from gem_server.core.state_machine import Core
from gem_server.core.timetable import PATIENCE, TOLERANCE, Timetable
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core import ONES, SMALL, commit, make_core, start

SHARED = Hyperparameters(optimizer="adamw", smallest_share=0.125)


def settled(
    paces: list[float], smallest: float = 0.125, noise: list[float] | None = None, rounds: int = 60
) -> list[set[float]]:
    """Workers that do as they are told, each with its seconds for a whole batch. Returns the shares of each in the second half
    of the rounds."""
    timetable = Timetable()
    shares, given, seen = Shares(timetable, smallest), [1.0] * len(paces), [set[float]() for _ in paces]
    for number in range(rounds):
        for worker, pace in enumerate(paces):
            lease, share = str(worker), given[worker]
            off = noise[(number * len(paces) + worker) % len(noise)] if noise else 1.0
            timetable.began(lease, 0.0, share)
            timetable.arrived(lease, pace * share * off, share)
            given[worker] = shares.next(lease)
            if number >= rounds // 2:
                seen[worker].add(given[worker])
    return seen


def test_each_worker_gets_the_share_in_which_its_step_takes_as_long_as_the_fastest_ones() -> None:
    assert settled([1.0, 1.0, 2.0, 3.0, 4.0, 8.0]) == [{1.0}, {1.0}, {0.5}, {0.3125}, {0.25}, {0.125}]


def test_a_share_stays_until_the_wanted_one_is_far_from_it() -> None:
    assert settled([1.0, 1.2, 1.3]) == [{1.0}, {1.0}, {0.75}]


def test_no_share_is_below_the_smallest_and_none_below_1_if_that_is_1() -> None:
    assert settled([1.0, 100.0], smallest=0.25) == [{1.0}, {0.25}]
    assert settled([1.0, 100.0], smallest=1.0) == [{1.0}, {1.0}]


def test_one_worker_alone_has_whole_batches_and_so_have_all_before_their_pace_is_known() -> None:
    assert settled([7.0]) == [{1.0}]
    timetable = Timetable()
    timetable.began("ann", 0.0, 1.0)
    timetable.arrived("ann", 100.0, 1.0)
    assert Shares(timetable, 0.125).next("ann") == Shares(timetable, 0.125).next("bob") == 1.0


def test_a_share_that_the_end_of_a_shard_has_cut_is_not_asked_for_again() -> None:
    timetable = Timetable()
    for brought in (1.0, 1.0, 0.27):
        for lease, pace, share in (("ann", 1.0, 1.0), ("bob", 4.0, brought)):
            timetable.began(lease, 0.0, share)
            timetable.arrived(lease, pace * share, share)
    assert Shares(timetable, 0.125).next("bob") == 0.25


def test_if_the_fastest_leaves_the_next_one_has_whole_batches() -> None:
    timetable = Timetable()
    shares = Shares(timetable, 0.125)
    for _ in range(3):
        for lease, pace in (("ann", 1.0), ("bob", 4.0)):
            timetable.began(lease, 0.0, 1.0)
            timetable.arrived(lease, pace, 1.0)
    assert shares.next("bob") == 0.25
    timetable.end("ann")
    assert shares.next("bob") == 1.0


def shares_of_the_second(fixed: float, whole: float, slow_until: float, end: float, part: float = 1.0) -> list[float]:
    """The shares of the second of two workers until the time `end`. The first takes 0.1 s for each step. The second takes the
    seconds `fixed`, and those of its share of `whole`; until `slow_until` 1 s more. It brings `part` of what it tries."""
    timetable, given = Timetable(), []
    shares = Shares(timetable, 0.0625)
    for _ in range(3):
        timetable.began("first", 0.0, 1.0)
        timetable.arrived("first", 0.1, 1.0)
    now = 0.0
    while now < end:
        shares.begin("second", now)
        given.append(share := timetable.share("second"))
        share *= part if len(given) > 1 and share > given[-2] else 1.0
        now += fixed + share * whole + (now < slow_until)
        timetable.arrived("second", now, share)
    return given


@pytest.mark.parametrize("fixed", [0.09, 0.05])
def test_a_worker_with_fixed_costs_that_was_slow_for_a_moment_has_whole_batches_again(fixed: float) -> None:
    given = shares_of_the_second(fixed, 0.1 - fixed, slow_until=10.0, end=30.0)
    assert min(given) < 0.25
    assert set(given[-100:]) == {1.0}


@pytest.mark.parametrize("part", [1.0, 0.6])
def test_a_slow_worker_tries_a_larger_share_seldom_and_goes_back(part: float) -> None:
    given = shares_of_the_second(0.0, 0.8, slow_until=0.0, end=300.0, part=part)
    tried = [share for share in given[10:] if share > 0.2]
    assert max(given[10:]) <= 2 * 0.15
    assert 3 <= len(tried) <= 6 + len(given) / PATIENCE[1]


def test_a_slow_worker_with_fixed_costs_gets_the_largest_share_that_keeps_it_in_step() -> None:
    given = shares_of_the_second(0.05, 0.1, slow_until=5.0, end=300.0)
    assert set(given[-20:]) <= {0.5, 1.0}
    assert given[-20:].count(0.5) >= 19


def test_a_slow_worker_whose_steps_a_smaller_batch_does_not_shorten_has_whole_batches() -> None:
    """Its steps take 0.4 s, whatever the batch: it sleeps, or waits for a link. Small batches would lose its samples."""
    given = shares_of_the_second(0.4, 0.0, slow_until=0.0, end=400.0)
    assert given[60:].count(1.0) > 0.8 * len(given[60:])
    given = shares_of_the_second(0.3, 0.1, slow_until=0.0, end=400.0)
    assert mean(given[60:]) > 0.8


def test_it_has_small_batches_again_once_they_shorten_its_steps() -> None:
    timetable = Timetable()
    shares = Shares(timetable, 0.0625)
    for _ in range(3):
        timetable.began("fast", 0.0, 1.0)
        timetable.arrived("fast", 0.1, 1.0)
    given, now = list[float](), 0.0
    for number in range(800):
        shares.begin("slow", now)
        given.append(share := timetable.share("slow"))
        now += 0.8 if number < 200 else 0.8 * share
        timetable.arrived("slow", now, share)
    assert mean(given[100:200]) > 0.8
    assert mean(given[500:]) < 0.2


def mean_share(tries: bool, fixed: float) -> float:
    """Of eight workers with exponential times, of which `fixed` seconds come on top whatever the share."""
    random, timetable, given = Random(0), Timetable(tries=tries), list[float]()
    shares, due = Shares(timetable, 0.0625), list[tuple[float, str]]()

    def begin(worker: str, now: float) -> None:
        shares.begin(worker, now)
        heappush(due, (now + fixed + timetable.share(worker) * random.expovariate(1.0), worker))

    for worker in "abcdefgh":
        begin(worker, 0.0)
    for _ in range(3_000):
        now, worker = heappop(due)
        given.append(timetable.share(worker))
        timetable.arrived(worker, now, given[-1])
        begin(worker, now)
    return mean(given[1_000:])


@pytest.mark.parametrize("fixed", [0.0, 0.3])
def test_of_random_times_a_lucky_try_of_one_makes_no_other_slow(fixed: float) -> None:
    assert mean_share(True, fixed) > 0.97 * mean_share(False, fixed)


@settings(max_examples=30)
@given(st.integers(1, 8), st.lists(st.floats(0.95, 1.05), min_size=40, max_size=200))
def test_noise_of_equal_workers_never_changes_a_share(workers: int, noise: list[float]) -> None:
    assert settled([1.0] * workers, noise=noise) == [{1.0}] * workers


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 20), min_size=2, max_size=8))
def test_a_slower_worker_never_has_a_larger_share_than_a_faster_one_but_for_the_tolerance(paces: list[float]) -> None:
    shares = settled(sorted(paces))
    assert all(len(of_one) == 1 for of_one in shares), "a share goes on changing"
    for pace, (share,) in zip(sorted(paces), shares, strict=True):
        wanted = max(0.125, min(paces) / pace)
        assert wanted / TOLERANCE - 1e-9 <= share <= wanted * TOLERANCE + 1e-9
    assert all(slower <= faster for (faster,), (slower,) in pairwise(shares))


@pytest.mark.parametrize(("named", "counts"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5), (0.01, 0.125)])
def test_a_commit_counts_its_share_from_the_smallest_to_1_and_1_if_it_names_none(named: float, counts: float) -> None:
    core = make_core(SHARED)
    (ann,) = start(core)
    commit(core, ann, 1, ONES, share=named)
    assert core.central.progress == counts
    assert core.central.version == 1


def test_if_all_batches_are_whole_what_a_commit_names_counts_nothing() -> None:
    core = make_core(Hyperparameters(optimizer="adamw"))
    (ann,) = start(core)
    commit(core, ann, 1, ONES, share=0.5)
    assert core.central.progress == core.central.version == 1


@pytest.mark.parametrize("share", [-0.5, 1.5, math.nan, math.inf])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    core = make_core(SHARED)
    (ann,) = start(core)
    with pytest.raises(InvalidRequest, match=r"of a whole batch: its batch_share is above 0 and at most 1"):
        commit(core, ann, 1, ONES, share=share)


# -- what is counted


def numbers(core: Core) -> tuple[float, float]:
    return core.central.progress, core.rounds


def test_n_counts_the_shares_of_the_others_since_a_workers_own_last_commit() -> None:
    core = make_core(SHARED)
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES)  # n = 1
    assert numbers(core) == (1, 1)
    commit(core, bob, 1, ONES, share=0.5)  # since it pulled: 1 and its own 0.5
    assert numbers(core) == (1.5, 1 + 0.5 / 1.5)
    commit(core, ann, 2, ONES)  # 0.5 and its own 1
    assert numbers(core) == (2.5, 1 + 0.5 / 1.5 + 1 / 1.5)
    commit(core, bob, 2, ONES, share=0.25)
    commit(core, bob, 3, ONES, share=0.25)  # alone: never below 1
    assert core.central.progress == 3.0
    assert core.rounds == pytest.approx(1 + 0.5 / 1.5 + 1 / 1.5 + 0.25 / 1.25 + 0.25)


def test_a_worker_that_overlaps_counts_from_the_reply_that_its_gradient_was_computed_on() -> None:
    core = make_core(SHARED)
    lease = core.register("ann", SMALL, 0.0, overlap=True).lease_id
    core.central.theta[:] = 0
    core.initialized()
    core.pull(core.leases.get(lease))
    commit(core, lease, 1, ONES, share=0.5)
    commit(core, lease, 2, ONES, base_version=0, share=0.5)  # on the pull: its first commit came between
    assert core.rounds == 0.5 + 0.5
    commit(core, lease, 3, ONES, base_version=1)
    assert core.rounds == 0.5 + 0.5 + 1 / 1.5
    commit(core, lease, 4, ONES, base_version=3)
    assert core.rounds == 0.5 + 0.5 + 1 / 1.5 + 1


def test_a_discarded_commit_counts_nothing() -> None:
    core = make_core(Hyperparameters(rule="ringmaster", rule_options="threshold=1", smallest_share=0.25))
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES, share=0.5)
    assert commit(core, bob, 1, ONES, share=0.5).discarded
    assert numbers(core) == (0.5, 0.5)
    assert core.leases.get(bob).progress == 0.5


def test_a_workers_influence_counts_its_shares() -> None:
    core = make_core(Hyperparameters(rule="downpour", smallest_share=0.25))
    (ann,) = start(core)
    assert commit(core, ann, 1, ONES, share=0.5).scale == 0.5


def test_the_schedule_follows_what_has_been_counted() -> None:
    falling = Hyperparameters(rule="downpour", smallest_share=0.25, schedule="cosine", decay_versions=4)
    core = make_core(falling)
    (ann,) = start(core)
    for sequence in (1, 2, 3):
        before = core.central.theta.copy()
        commit(core, ann, sequence, ONES, share=0.5)
        expected = 0.05 * 0.5 * factor(falling, 0.5 * (sequence - 1))
        assert before[0] - core.central.theta[0] == pytest.approx(expected, rel=1e-5)


def test_a_warm_up_ends_at_the_whole_rate() -> None:
    """Its factor is never above 1, however much of a batch is left of it."""
    rising = Hyperparameters(warmup_versions=2)
    assert [factor(rising, progress) for progress in (0.0, 0.5, 1.0, 1.5, 2.0)] == [0.5, 0.75, 1.0, 1.0, 1.0]
