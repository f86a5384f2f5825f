"""A scenario to simulate: a setup, and what the closed form does not have: spread, mixed speeds, a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from gem_api.hyperparameters import Hyperparameters

from gem_ctl.planning.events import Column, Network, Times
from gem_ctl.planning.plan import MEASURED, Costs, Setup, server_seconds, transfer_seconds, wire_bytes

# What TCP fills of a link with tensors while both directions are busy: the rest is headers, acknowledgements, and what it sends
# again. `iperf3 --bidir` gets as much on the link of `python -m benchmarks.network`.
FILLED = 0.8
# A connection begins slowly if it has rested for RESTED seconds. It sends FIRST_BYTES in the first round trip (RFC 6928), and
# twice as many in each one after it. That is Linux's default, which `gem-ctl doctor` advises against.
RESTED, FIRST_BYTES = 0.3, 14_600
WINDOW = 3_000_000  # bytes of a connection that are under way at most with Linux's default buffers, as `iperf3` has them
# Transfers of more bytes have the server's link one at a time, or as many as fill it: of at most half of the workers, and of as
# many as the server has buffers for.
LARGE, TOGETHER = 16 << 20, 4
_MIXED = 1000  # workers that are enough for the shares of all speeds


@dataclass(frozen=True)
class Slow:
    """Workers of another speed.

    Attributes:
        share: Their share of all workers, 0 to 1.
        factor: How many times as long they compute, at least 1.
    """

    share: float
    factor: float


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    Attributes:
        setup: The run, as for `plan`.
        costs: What a commit costs the server.
        spread: Standard deviation of the compute time of a step, relative to its mean.
        slow: Groups of workers that are slower than the others. Their shares add up to at most 1.
        latency: Seconds that a byte is under way between worker and server, one way.
        bandwidth: Bytes per second of the link of each worker and of each server, each way; 0 for no limit.
        batches: Number of batches of the whole run; 0 if it is not known.
    """

    setup: Setup
    costs: Costs = MEASURED
    spread: float = 0.1
    slow: tuple[Slow, ...] = ()
    latency: float = 0.0
    bandwidth: float = 0.0
    batches: int = 0


def speeds(scenario: Scenario) -> dict[float, int]:
    """The number of workers for each factor of their compute time; those of factor 1 come first.

    The sum is the setup's number of workers. A share is rounded to whole workers.
    """
    workers = scenario.setup.workers
    ends = np.rint(workers * np.cumsum([0.0, *(group.share for group in scenario.slow)])).astype(int)
    counts = {1.0: workers - int(ends[-1])}
    for group, count in zip(scenario.slow, np.diff(ends).tolist(), strict=True):
        counts[group.factor] = counts.get(group.factor, 0) + count
    return {factor: count for factor, count in counts.items() if count}


def times(scenario: Scenario) -> Times:
    """The durations in a scenario, with each worker's share of a batch. Raises InvalidRequest for an unknown format."""
    whole = _whole(scenario)
    return replace(whole, compute=_shares(scenario.setup, whole) * whole.compute)


def _whole(scenario: Scenario) -> Times:
    """The durations with whole batches. A shared memory has no network."""
    setup = scenario.setup
    per_commit = setup.local_steps * setup.compute_seconds
    compute = np.concatenate([np.full(count, per_commit * factor) for factor, count in speeds(scenario).items()])
    up, down = _network(scenario)
    return Times(
        compute=compute,
        spread=scenario.spread * setup.local_steps**-0.5,  # the sum of the steps' times spreads less than each
        server=server_seconds(setup, scenario.costs),
        up=up,
        down=down,
        overlap=setup.overlap,
    )


def alone(of: Times) -> Column:
    """Mean seconds from one commit of a worker to its next if it never waits for others. Shape (workers,)."""
    round_trip = of.server + sum(max(way.worker, way.server) + way.latency for way in (of.up, of.down))
    return np.maximum(of.compute, round_trip) if of.overlap else of.compute + round_trip


def bottleneck(of: Times) -> float:
    """The least seconds from one commit to the next: the server's, or those of its link."""
    return max(of.server, of.up.server, of.down.server)


def workers_that_pay(scenario: Scenario) -> int:
    """The number of workers up to which each brings about as many commits as one alone: as many as fill the server or its link.

    Further ones mostly wait. The setup's own number of workers does not count. Raises InvalidRequest for an unknown format.
    """
    of = times(replace(scenario, setup=replace(scenario.setup, workers=_MIXED)))
    return max(1, math.floor(1 / (bottleneck(of) * float(np.mean(1 / alone(of))))))


def contribution(scenario: Scenario, factor: float) -> float:
    """The gain of one more worker, whose computing takes `factor` times as long: gradients of whole batches a second. Below 0
    if a full server then takes fewer of the others' gradients. Raises InvalidRequest for an unknown format."""
    of, setup = _whole(scenario), scenario.setup
    one = setup.local_steps * setup.compute_seconds * factor
    return _gradients(setup, replace(of, compute=np.append(of.compute, one))) - _gradients(setup, of)


def gradients_per_second(scenario: Scenario) -> float:
    """Gradients of whole batches of all workers. Raises InvalidRequest for an unknown format."""
    return _gradients(scenario.setup, _whole(scenario))


def shares(scenario: Scenario) -> Column:
    """Each worker's share of a batch, shape (workers,). Raises InvalidRequest for an unknown format."""
    return _shares(scenario.setup, _whole(scenario))


def _gradients(setup: Setup, of: Times) -> float:
    """Gradients of whole batches a second of all workers, which take the times `of` for a whole batch."""
    batches = _shares(setup, of)
    rates = 1 / alone(replace(of, compute=batches * of.compute))
    full = max(1.0, bottleneck(of) * float(rates.sum()))
    return setup.local_steps * float((batches * rates).sum()) / full


def _shares(setup: Setup, whole: Times) -> Column:
    """The shares of a batch with which all steps take about as long as the fastest; 1 if the run has no shares by default."""
    run = Hyperparameters(rule=setup.rule, optimizer=setup.optimizer, local_steps=setup.local_steps)
    smallest, seconds = run.with_defaults(("rule", "optimizer", "local_steps")).smallest_share, alone(whole)
    return np.asarray(np.maximum(smallest, seconds.min() / seconds))


def _network(scenario: Scenario) -> tuple[Network, Network]:
    setup = scenario.setup
    if setup.shared_memory:
        return Network(), Network()
    own = transfer_seconds(setup, scenario.costs)
    sizes = wire_bytes(setup)
    links = [count / (FILLED * scenario.bandwidth) if scenario.bandwidth else 0.0 for count in sizes]
    ways = zip(own, sizes, links, reversed(links), strict=True)
    up, down = (_way(scenario, mine, count, link, other) for mine, count, link, other in ways)
    return up, down


def _way(scenario: Scenario, own: float, count: int, link: float, other: float) -> Network:
    """One direction, in which a worker needs its `own` seconds for a transfer of `count` bytes, and a link `link` seconds; the
    other direction's transfers take `other`."""
    if not scenario.bandwidth:
        return Network(own, latency=scenario.latency)
    round_trip = 2 * scenario.latency
    connection = max(link, (count - WINDOW) / WINDOW * round_trip) + _slow_start(scenario, count, link, other)
    together = max(1, min(scenario.setup.workers // 2, TOGETHER)) if count > LARGE else math.inf
    return Network(own + connection, max(link, connection / together) / scenario.setup.servers, scenario.latency)


def _slow_start(scenario: Scenario, count: int, link: float, other: float) -> float:
    """Seconds that a transfer loses because its connection begins slowly. It rests while its worker computes and receives, and
    while the link carries the other workers' transfers."""
    setup, round_trip = scenario.setup, 2 * scenario.latency
    rested = max(setup.local_steps * setup.compute_seconds + other, (setup.workers - 1) * link)
    reached = min(count, WINDOW, scenario.bandwidth * round_trip)
    return round_trip * math.log2(reached / FIRST_BYTES) if rested > RESTED and reached > FIRST_BYTES else 0.0
