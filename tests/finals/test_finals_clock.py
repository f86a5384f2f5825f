"""The clock of simulated clusters: what the server's own timetable, shares and held replies make of unequal times."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.finals.clock import SIZES, Clock, Event, Policy
from benchmarks.versus.profiles import KINDS

IN_STEP = Policy(smallest=1 / 16, wait=0.15)


def events(name: str, policy: Policy, workers: int = 8, limit: float = 60.0, seed: int = 0) -> list[Event]:
    return Clock(KINDS[name], workers, seed, policy, limit).events()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("policy", [Policy(), IN_STEP, Policy(wait=0.3, until=20)])
def test_each_gradient_has_begun_with_a_reply_and_nobody_is_forgotten(name: str, policy: Policy) -> None:
    begun: dict[int, Event] = {}
    happened = events(name, policy)
    for event in happened:
        if event.size:
            assert begun.pop(event.worker).step == event.step
        else:
            begun[event.worker] = event
    assert {event.worker for event in happened if event.size} == set(range(8))
    assert [event.time for event in happened] == sorted(event.time for event in happened)


@pytest.mark.parametrize("name", KINDS)
def test_no_reply_waits_longer_than_a_share_of_the_step_that_its_worker_usually_needs(name: str) -> None:
    longest, arrived = dict.fromkeys(range(8), 0.0), dict[int, float]()
    steps: dict[int, list[float]] = {worker: [] for worker in range(8)}
    began = dict.fromkeys(range(8), 0.0)
    for event in events(name, Policy(wait=0.15), limit=200):
        if event.size:
            arrived[event.worker] = event.time
            steps[event.worker].append(event.time - began[event.worker])
        else:
            began[event.worker] = event.time
            if event.held:
                longest[event.worker] = max(longest[event.worker], event.time - arrived[event.worker])
    for worker, waited in longest.items():
        assert waited <= 0.15 * max(steps[worker]) + 1e-9


def test_batches_in_proportion_make_all_steps_about_as_long_as_the_fastest() -> None:
    sizes = Counter((event.worker >= 4, event.size) for event in events("mixed", IN_STEP, limit=200) if event.size)
    assert sizes[False, SIZES] > 0.99 * sum(count for (slow, _), count in sizes.items() if not slow)
    assert sizes[True, 5] > 0.9 * sum(count for (slow, _), count in sizes.items() if slow)


def test_shares_of_equal_workers_stay_whole() -> None:
    assert {event.size for event in events("equal", IN_STEP, limit=200)} == {0, SIZES}


def test_replies_of_equal_workers_are_held_until_all_are_there() -> None:
    happened = [event for event in events("equal", IN_STEP, limit=60) if event.time > 10]
    released = Counter(event.time for event in happened if not event.size)
    assert sum(count == 8 for count in released.values()) > 0.4 * len(released)


def test_a_killed_worker_holds_nobody_up() -> None:
    """The worker that is away from 20 to 30 is expected at first, for 0.15 of a step."""
    happened = events("spot", IN_STEP, limit=30)
    away = [event for event in happened if 22 < event.time < 30]
    assert len({event.worker for event in away}) == 7
    assert len([event for event in away if event.size]) > 7 * 6


@pytest.mark.parametrize("name", KINDS)
def test_times_depend_on_seed_worker_and_step_alone(name: str) -> None:
    first, again = (KINDS[name].times(1, 2, 8) for _ in range(2))
    assert [first(step) for step in range(600)] == [again(step) for step in reversed(range(600))][::-1]
    assert first(0) != KINDS[name].times(2, 2, 8)(0) != KINDS[name].times(2, 3, 8)(0)


def test_the_mean_time_of_an_equal_worker_is_one_unit() -> None:
    for name in ("equal", "noisy", "exponential"):
        time = KINDS[name].times(0, 0, 8)
        assert sum(map(time, range(20_000))) / 20_000 == pytest.approx(1, abs=0.03)


def test_the_first_worker_is_never_killed() -> None:
    kills = [KINDS["spot"].kills(8)(number) for number in range(50)]
    assert {worker for _, worker in kills} == set(range(1, 8))
    assert [moment for moment, _ in kills[:3]] == [20, 40, 60]
