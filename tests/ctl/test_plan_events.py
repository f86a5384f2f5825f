"""What gem-ctl plan simulates, beside an oracle that has an event for everything."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

import numpy as np
import pytest
from gem_ctl.planning.events import Network, Times, simulate
from hypothesis import given, settings
from hypothesis import strategies as st


def fixed(compute: list[float], server: float, **others: Any) -> Times:
    return Times(np.array(compute), server, **others)


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
    assert np.all(trace.arrived <= trace.started)
    assert trace.applied - trace.started == pytest.approx(times.server)
    assert trace.worker.tolist() == [worker for worker, _, _ in expected]
    assert trace.staleness.tolist() == [staleness for _, staleness, _ in expected]
    assert trace.applied == pytest.approx([applied for _, _, applied in expected])


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
