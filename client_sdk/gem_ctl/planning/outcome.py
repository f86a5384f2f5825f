"""The outcome of a simulation: rates, staleness, queue and load, without the beginning, in which the queue still fills."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gem_ctl.planning.events import Integers, Times, Trace, simulate
from gem_ctl.planning.plan import plan
from gem_ctl.planning.scenario import Scenario, alone, bottleneck, contribution, shares, speeds, times

MAX_COMMITS = 1_000_000
_MIN_COMMITS, _SPREAD = 10_000, 0.33  # with a larger spread more commits: the rate's error is spread / √commits
_WARM_UP, _MEASURED = 2, 10  # in rounds: the time of a commit of the slowest worker


@dataclass(frozen=True)
class Distribution:
    """A mean, percentiles and the maximum."""

    mean: float
    p5: float
    p50: float
    p95: float
    max: float


@dataclass(frozen=True)
class Group:
    """Workers of one speed.

    Attributes:
        factor: How many times as long as --compute-seconds they compute.
        workers: Their number.
        commits_per_second: Commits of all of them together.
        staleness: That of their commits; None if they made none.
        further: What one more of them would bring: gradients of whole batches per second.
    """

    factor: float
    workers: int
    commits_per_second: float
    staleness: Distribution | None
    further: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a scenario's simulation. Figures of the server hold for each of several.

    Attributes:
        workers: Number of workers.
        commits: Number of commits that were counted.
        seconds: Simulated time in which they were applied.
        commits_per_second: Commits of all workers together.
        staleness: τ of the commits.
        queue_mean, queue_max: Commits that wait, without the one being applied.
        wait: Mean seconds that a commit waits in the queue.
        round_trip: Mean seconds from sending a commit to having its answer.
        idle: Share of the time in which the workers do not compute, 0 to 1.
        load: Share of the time in which the server is busy, 0 to 1.
        server_bytes: Memory of the server.
        groups: The workers by their speed.
        further: What one more worker of factor 1 would bring: gradients of whole batches per second.
        run_seconds: How long the run takes; 0 if its length is not known.
        settled: Whether the simulation was long enough for two commits of the slowest worker after the warm-up.
    """

    workers: int
    commits: int
    seconds: float
    commits_per_second: float
    staleness: Distribution
    queue_mean: float
    queue_max: int
    wait: float
    round_trip: float
    idle: float
    load: float
    server_bytes: int
    groups: tuple[Group, ...]
    further: float
    run_seconds: float
    settled: bool


def outcome(scenario: Scenario, seed: int = 0, max_commits: int = MAX_COMMITS) -> Outcome:
    """Simulates a scenario. Raises InvalidRequest for an unknown format.

    Args:
        scenario: What to simulate.
        seed: Of the random numbers. The same seed gives the same outcome.
        max_commits: Most commits to simulate, at least 10.
    """
    of = times(scenario)
    one = commits_in_a_round(of)
    least = round(_MIN_COMMITS * max(1, (of.spread / _SPREAD) ** 2))
    total = min(max_commits, max(least, math.ceil((_WARM_UP + _MEASURED) * one)))
    warm_up = max(1, total * _WARM_UP // (_WARM_UP + _MEASURED))
    return _evaluate(scenario, of.server, simulate(of, total, seed), warm_up, settled=total - warm_up >= 2 * one)


def commits_in_a_round(of: Times) -> float:
    """The commits that are applied between two of the slowest worker, at most about."""
    rate = min(float(np.sum(1 / np.maximum(alone(of), 1e-12))), 1 / max(bottleneck(of), 1e-12))
    return len(of.compute) + rate * float(np.max(alone(of)))


def _evaluate(scenario: Scenario, server_seconds: float, trace: Trace, warm_up: int, settled: bool) -> Outcome:
    """The statistics of the commits after the first `warm_up` ones."""
    counted = slice(warm_up, None)
    seconds = max(float(trace.applied[-1] - trace.applied[warm_up - 1]), 1e-12)
    waits = (trace.started - trace.arrived)[counted]
    rate = len(waits) / seconds
    batches = scenario.setup.local_steps * shares(scenario)[trace.worker[counted]]  # whole ones in each commit
    return Outcome(
        workers=scenario.setup.workers,
        commits=len(waits),
        seconds=seconds,
        commits_per_second=rate,
        staleness=_distribution(trace.staleness[counted]),
        queue_mean=float(waits.sum()) / seconds,
        queue_max=_longest_queue(trace, warm_up),
        wait=float(waits.mean()),
        round_trip=float((trace.answered - trace.sent)[counted].mean()),
        idle=max(0.0, 1 - float(trace.computed[counted].sum()) / seconds / scenario.setup.workers),
        load=min(1.0, rate * server_seconds),
        server_bytes=plan(scenario.setup, scenario.costs).server_bytes,
        groups=_groups(scenario, trace, warm_up, seconds),
        further=contribution(scenario, 1.0),
        run_seconds=scenario.batches * seconds / float(batches.sum()),
        settled=settled,
    )


def _longest_queue(trace: Trace, warm_up: int) -> int:
    """The most commits that wait at the same time: counted whenever one arrives, and that one too if it waits."""
    arrived = trace.arrived[warm_up:]
    begun = np.searchsorted(trace.started, arrived, side="right")
    return int(max(0, (np.arange(warm_up, len(trace.arrived)) + 1 - begun).max()))


def _groups(scenario: Scenario, trace: Trace, warm_up: int, seconds: float) -> tuple[Group, ...]:
    counts = speeds(scenario)
    ends = np.cumsum(list(counts.values()))
    of = np.searchsorted(ends, trace.worker[warm_up:], side="right")  # the group of each commit
    staleness = trace.staleness[warm_up:]
    found = []
    for number, (factor, workers) in enumerate(counts.items()):
        theirs = staleness[of == number]
        distribution = _distribution(theirs) if len(theirs) else None
        found.append(Group(factor, workers, len(theirs) / seconds, distribution, contribution(scenario, factor)))
    return tuple(found)


def _distribution(values: Integers) -> Distribution:
    p5, p50, p95 = np.percentile(values, (5, 50, 95), method="inverted_cdf")
    return Distribution(float(values.mean()), float(p5), float(p50), float(p95), float(values.max()))
