"""The events of a simulation: workers compute, send commits, wait in the server's FIFO, and get answers.

Everything is first come, first served, and all commits have the same size. So commits are applied in the order in which they
are sent, and one event per commit is enough: the moment at which a worker sends it. All later times of the commit follow from
those of the commit before it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_DRAWS = 1 << 14  # random numbers drawn at once
_MIN_SPREAD = 1e-6  # less is none


@dataclass(frozen=True)
class Network:
    """One direction of the network, in seconds.

    Attributes:
        worker: What the worker, or its link, needs for a commit or for an answer.
        server: What the server's link needs for its part. It carries one part after the other.
        latency: How long a byte is under way.
    """

    worker: float = 0.0
    server: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Times:
    """Durations in seconds.

    Attributes:
        compute: Mean time that each worker computes for one commit. Shape (workers,).
        spread: Standard deviation of a worker's compute times from commit to commit, relative to their mean.
        server: Mean time of a server for one commit, or for its part of it.
        up, down: The network from the workers to the servers, and back.
        overlap: Whether a worker computes its next gradient while its commit is under way.
    """

    compute: Column
    server: float
    spread: float = 0.0
    up: Network = Network()
    down: Network = Network()
    overlap: bool = False


@dataclass(frozen=True)
class Trace:
    """The simulated commits, in the order in which they were applied. Each array has the shape (commits,), times in seconds.

    Attributes:
        worker: Index of the worker that sent it.
        staleness: τ, the number of commits applied between the worker's pull and this commit (Eq. 2).
        sent: When the worker began to send it.
        arrived: When the servers had received all of it.
        started: When the server began to apply it.
        applied: When the server had applied it.
        answered: When the worker had received the answer.
        computed: Time for which the worker computes its next gradient.
    """

    worker: Integers
    staleness: Integers
    sent: Column
    arrived: Column
    started: Column
    applied: Column
    answered: Column
    computed: Column


def simulate(times: Times, commits: int, seed: int = 0) -> Trace:
    """Simulates until this many commits are applied. The workers begin at random moments of their first computation.

    The same arguments give the same trace.
    """
    generator = np.random.default_rng(seed)
    compute: list[float] = times.compute.tolist()
    phases = generator.random(len(compute)) * times.compute
    heap = sorted(zip(phases.tolist(), range(len(compute)), strict=True))
    factors = _factors(generator, times.spread)
    uplink, downlink = _Link(times.up), _Link(times.down)
    applied = 0.0  # several servers take the same time for their parts of a commit, at the same time: one stands for all
    pulled = [0] * len(compute)  # the version that a worker's gradient is computed on
    received = [0] * len(compute)  # the version of the answer to the worker's last commit
    rows = array("d")
    for version in range(commits):
        sent, worker = heap[0]
        arrived = uplink.transfer(sent)
        started = arrived if arrived > applied else applied
        applied = started + times.server
        answered = downlink.transfer(applied)
        computed = compute[worker] * next(factors)
        rows.extend((worker, version - pulled[worker], sent, arrived, started, applied, answered, computed))
        if times.overlap:
            pulled[worker], received[worker] = received[worker], version + 1
            following = max(sent + computed, answered)
        else:
            pulled[worker] = version + 1
            following = answered + computed
        heapq.heapreplace(heap, (following, worker))
    of_worker, staleness, *columns = np.frombuffer(rows).reshape(commits, -1).T.copy()
    return Trace(of_worker.astype(np.int64), staleness.astype(np.int64), *columns)


class _Link:
    """One direction of the network: the workers' own links, and the one link of a server, which they share."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free = 0.0

    def transfer(self, begin: float) -> float:
        """The time at which a commit or an answer that is sent at `begin` has arrived. Call it in the order of `begin`."""
        network = self._network
        self._free = free = (begin if begin > self._free else self._free) + network.server
        received = begin + network.worker
        return (received if received > free else free) + network.latency


def _factors(generator: np.random.Generator, spread: float) -> Iterator[float]:
    """Random factors with mean 1 and this standard deviation, one after another; all 1 without a spread. They are gamma
    distributed, as the sum of such times is too."""
    if spread < _MIN_SPREAD:
        return repeat(1.0)
    shape = spread**-2
    return chain.from_iterable(generator.gamma(shape, 1 / shape, _DRAWS).tolist() for _ in repeat(None))
