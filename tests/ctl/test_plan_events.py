"""What gem-ctl plan simulates: cases worked out by hand, and an oracle that has an event for everything."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gem_ctl.planning.events import Network, Times, Trace, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

SETTLED = slice(-60, None)  # commits after the beginning


def fixed(compute: list[float], server: float, **others: Any) -> Times:
    return Times(np.array(compute), server, **others)


def settled(times: Times, commits: int = 300) -> Trace:
    """The last commits of a simulation. Of times without spread, they repeat themselves."""
    trace = simulate(times, commits)
    return Trace(*(column[SETTLED] for column in vars(trace).values()))


def test_two_workers_that_fill_the_server_wait_for_each_other() -> None:
    """A cycle of 6 seconds: 1 for the gradient, 3 in the server, and 2 in the queue, until the other one is served."""
    trace = settled(fixed([1.0, 1.0], 3.0))
    assert np.diff(trace.applied) == pytest.approx(3.0)
    assert trace.started - trace.arrived == pytest.approx(2.0)
    assert set(trace.staleness) == {1}


def test_a_slow_worker_is_as_stale_as_the_fast_one_is_faster() -> None:
    """The fast worker commits every 2 seconds, the slow one every 8: four commits of the one for each of the other. So the slow
    one's are 4 versions old, and of four of the fast one's, one is 1 version old."""
    trace = settled(fixed([1.0, 7.0], 1.0))
    assert Counter(trace.staleness.tolist()) == {0: 36, 1: 12, 4: 12}
    assert Counter(trace.worker.tolist()) == {0: 48, 1: 12}


def test_the_network_delays_a_commit_both_ways_but_does_not_keep_the_server_busy() -> None:
    way = Network(worker=0.5, server=0.1, latency=0.25)
    trace = settled(fixed([1.0], 1.0, up=way, down=way))
    assert np.diff(trace.applied) == pytest.approx(1.0 + 1.0 + 2 * (0.5 + 0.25))
    assert trace.arrived - trace.sent == pytest.approx(0.75)
    assert trace.applied - trace.started == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_trace_and_another_one_another() -> None:
    times = fixed([1.0, 2.0, 3.0], 0.5, spread=0.2)
    first, again, other = simulate(times, 500, 7), simulate(times, 500, 7), simulate(times, 500, 8)
    assert all(np.array_equal(one, two) for one, two in zip(vars(first).values(), vars(again).values(), strict=True))
    assert not np.array_equal(first.applied, other.applied)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_compute_times_have_the_mean_and_the_deviation_asked_for(spread: float) -> None:
    computed = simulate(fixed([2.0, 2.0], 0.1, spread=spread), 40_000).computed
    assert computed.mean() == pytest.approx(2.0, rel=0.02)
    assert computed.std() == pytest.approx(2.0 * spread, rel=0.03)
    assert computed.min() > 0


# -- the oracle

seconds = st.floats(0.01, 10.0)
ways = st.builds(Network, worker=st.just(0.0) | seconds, server=st.just(0.0) | seconds, latency=st.just(0.0) | seconds)
all_times = st.builds(
    Times,
    compute=st.lists(seconds, min_size=1, max_size=6).map(np.array),
    server=seconds,
    up=ways,
    down=ways,
    overlap=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(all_times, st.integers(0, 3))
def test_the_trace_is_that_of_an_oracle_with_an_event_for_everything(times: Times, seed: int) -> None:
    trace = simulate(times, 80, seed)
    expected = oracle(times, 80, seed)
    assert trace.worker.tolist() == [worker for worker, _, _ in expected]
    assert trace.staleness.tolist() == [staleness for _, staleness, _ in expected]
    assert trace.applied == pytest.approx([applied for _, _, applied in expected])


@settings(max_examples=60, deadline=None)
@given(all_times, st.floats(0, 1))
def test_every_commit_is_applied_once_in_order_and_after_it_was_sent(times: Times, spread: float) -> None:
    trace = simulate(replace(times, spread=spread), 200)
    ordered = (trace.sent, trace.arrived, trace.started, trace.applied, trace.answered)
    assert all(np.all(np.diff(column) >= 0) for column in ordered), "first come, first served"
    assert all(np.all(before <= after) for before, after in pairwise(ordered))
    assert np.all(trace.staleness >= 0)
    for worker in set(trace.worker.tolist()):
        of = trace.worker == worker
        assert np.all(trace.answered[of][:-1] <= trace.sent[of][1:]), "a worker has one commit under way"
        if not times.overlap:
            own = np.flatnonzero(of)
            assert trace.staleness[of].tolist() == expected_staleness(own)


def expected_staleness(own: Any) -> list[int]:
    """τ of the commits that a worker made as commit number `own` of all: the commits of others since its last."""
    return [int(own[0]), *(np.diff(own) - 1).tolist()]


def oracle(times: Times, commits: int, seed: int) -> list[tuple[int, int, float]]:
    """Worker, staleness and time of each commit. Commits and answers queue at the links, and commits at the server."""
    count = len(times.compute)
    phases = np.random.default_rng(seed).random(count) * times.compute
    events: list[tuple[float, int, str]] = [(float(phase), worker, "computed") for worker, phase in enumerate(phases)]
    heapq.heapify(events)
    queues: dict[str, deque[int]] = {name: deque() for name in ("up", "server", "down")}
    busy = dict.fromkeys(queues, False)
    version, base, answer = 0, [0] * count, [0] * count
    gradient, under_way = [False] * count, [False] * count
    begun: dict[tuple[str, int], float] = {}
    applied: list[tuple[int, int, float]] = []
    duration = {"up": times.up.server, "server": times.server, "down": times.down.server}
    then = {"up": "left up", "server": "applied", "down": "left down"}
    frozen_base = [0] * count

    def enter(name: str, worker: int, now: float) -> None:
        begun[name, worker] = now
        queues[name].append(worker)
        serve(name, now)

    def serve(name: str, now: float) -> None:
        if queues[name] and not busy[name]:
            busy[name] = True
            heapq.heappush(events, (now + duration[name], queues[name].popleft(), then[name]))

    def send(worker: int, now: float) -> None:
        gradient[worker], under_way[worker] = False, True
        frozen_base[worker] = base[worker]
        enter("up", worker, now)
        if times.overlap:
            base[worker] = answer[worker]
            heapq.heappush(events, (now + float(times.compute[worker]), worker, "computed"))

    while len(applied) < commits:
        now, worker, what = heapq.heappop(events)
        if what == "computed":
            gradient[worker] = True
            if not under_way[worker]:
                send(worker, now)
        elif what == "left up":
            busy["up"] = False
            there = max(begun["up", worker] + times.up.worker, now) + times.up.latency
            heapq.heappush(events, (there, worker, "arrived"))
            serve("up", now)
        elif what == "arrived":
            enter("server", worker, now)
        elif what == "applied":
            busy["server"] = False
            applied.append((worker, version - frozen_base[worker], now))
            version += 1
            answer[worker] = version
            enter("down", worker, now)
            serve("server", now)
        elif what == "left down":
            busy["down"] = False
            there = max(begun["down", worker] + times.down.worker, now) + times.down.latency
            heapq.heappush(events, (there, worker, "answered"))
            serve("down", now)
        else:
            under_way[worker] = False
            if times.overlap:
                if gradient[worker]:
                    send(worker, now)
            else:
                base[worker] = answer[worker]
                heapq.heappush(events, (now + float(times.compute[worker]), worker, "computed"))
    return applied
