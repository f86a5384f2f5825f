"""How many workers saturate a server, and how many servers keep the load below a bound: found by simulating."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from gem_api.ranges import MAX_RANGES, UNIT

from gem_ctl.simulation.outcome import MAX_COMMITS, outcome
from gem_ctl.simulation.scenario import Scenario, alone, bottleneck, times

SATURATED = 0.99  # share of the time in which the servers, or their links, are busy
MAX_WORKERS = 100_000  # more are not simulated to find the number that saturates
_TOLERANCE = 0.01
_COMMITS, _ROUNDS = 50_000, 10  # a search simulates at most _COMMITS + _ROUNDS * workers commits at a time
_SAMPLE = 1000  # workers that stand for all, in their shares, when their mean rate is needed


def full_at(scenario: Scenario) -> float:
    """The closed form: the number of workers that would saturate the servers if none ever waited for another."""
    of = times(_with_workers(scenario, _SAMPLE))
    slowest = bottleneck(of)
    return float(1 / (slowest * np.mean(1 / alone(of)))) if slowest else float("inf")


def saturating_workers(scenario: Scenario, seed: int = 0, max_commits: int = MAX_COMMITS) -> int | None:
    """The number of workers with which the servers, or their links, are busy 99 % of the time; found to 1 %.

    Returns None if it is above 100,000. The scenario's own number of workers does not matter.
    """
    closed = full_at(scenario)
    if closed > MAX_WORKERS:
        return None
    of = times(_with_workers(scenario, 1))
    link = max(of.up.server, of.down.server)

    def saturated(workers: int) -> bool:
        commits = min(max_commits, _COMMITS + _ROUNDS * workers)
        found = outcome(_with_workers(scenario, workers), seed, commits)
        return max(found.load, found.commits_per_second * link) >= SATURATED

    low, high = 0, max(1, round(closed))
    while not saturated(high):
        if high == MAX_WORKERS:
            return None
        low, high = high, min(MAX_WORKERS, max(high + 1, round(1.1 * high)))
    return _least(saturated, low if low else _below(saturated, high), high, _TOLERANCE)


def servers_for_load(scenario: Scenario, load: float, seed: int = 0, max_commits: int = MAX_COMMITS) -> int | None:
    """The least number of servers that are busy at most this share of the time; None if no number is enough.

    The scenario's own number of servers does not matter.
    """
    most = max(1, min(MAX_RANGES, scenario.setup.parameters // UNIT))

    def calm(servers: int) -> bool:
        several = replace(scenario, setup=replace(scenario.setup, servers=servers))
        of = times(several)
        if np.sum(1 / alone(of)) * of.server <= load:
            return True  # not even workers that never wait would load it more
        return outcome(several, seed, max_commits).load <= load

    if not calm(most):
        return None
    return _least(calm, 0, most)


def _least(holds: Callable[[int], bool], low: int, high: int, tolerance: float = 0.0) -> int:
    """The least number that holds, above `low` and up to `high`, which does; found to this relative tolerance."""
    while high - low > max(1, tolerance * high):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _below(holds: Callable[[int], bool], high: int) -> int:
    """A number below `high` that does not hold; 0 if there is none."""
    step = max(1, high // 50)
    while high > step and holds(high - step):
        high, step = high - step, 2 * step
    return max(0, high - step)


def _with_workers(scenario: Scenario, workers: int) -> Scenario:
    return replace(scenario, setup=replace(scenario.setup, workers=workers))
