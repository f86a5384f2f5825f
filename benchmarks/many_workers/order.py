"""Whose commit comes next."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_client.run.batch_sizes import batch_sizes
from gem_server.core.releases import WAIT_ROUNDS

from benchmarks.finals.clock import Clock, Policy
from benchmarks.paper.experiments import Experiment
from benchmarks.versus.profiles import Profile


class Turn(NamedTuple):
    """One commit, or a reply that was held.

    Attributes:
        worker: Its number, from 0.
        samples: Size of its batch; 0: its reply was held, and is released.
    """

    worker: int
    samples: int


def simulated(experiment: Experiment) -> Iterator[Turn]:
    """The turns of workers that begin together and compute all the time.

    The time for one gradient has a gamma distribution: a spread of 1 makes it exponential; 0 makes all alike, and the workers
    march in lockstep. If batches vary, the times of their gradients are in proportion. With `reply_wait` the server holds
    replies.
    """
    if experiment.reply_wait:
        yield from _in_step(experiment)
        return
    batch, varied, spread = experiment.batch_size, experiment.batch_variation, experiment.spread
    random = np.random.default_rng([1, experiment.seed])
    shard = Hyperparameters(batch_size=batch, batch_variation=varied).default_shard_size
    sizes: list[list[int]] = [[] for _ in range(experiment.workers)]

    def begin(number: int, now: float) -> tuple[float, int, int]:
        sizes[number] = sizes[number] or batch_sizes(shard, batch, varied, random)
        samples = sizes[number].pop()
        seconds = random.gamma(1 / spread**2, spread**2) if spread else 1.0
        return now + seconds * samples / batch, number, samples

    running = [begin(number, 0.0) for number in range(experiment.workers)]
    left = [experiment.commits_each] * experiment.workers
    heapq.heapify(running)
    while running:
        now, number, samples = heapq.heappop(running)
        yield Turn(number, samples)
        left[number] -= 1
        if left[number]:
            heapq.heappush(running, begin(number, now))


def _in_step(experiment: Experiment) -> Iterator[Turn]:
    shape, scale = 1 / experiment.spread**2, experiment.spread**2
    profile = Profile("all alike", draw=lambda random, size: random.gamma(shape, scale, size))
    policy = Policy(wait=experiment.reply_wait, until=WAIT_ROUNDS)
    left = experiment.workers * experiment.commits_each
    for event in Clock(profile, experiment.workers, experiment.seed, policy, math.inf).iterate():
        if event.held:
            yield Turn(event.worker, 0)
        elif event.size:
            yield Turn(event.worker, experiment.batch_size)
            left -= 1
            if not left:
                return


def recorded(commits: Path) -> Iterator[Turn]:
    """The turns of a run of the real service, from the commits.csv that it left."""
    numbers: dict[str, int] = {}
    with commits.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield Turn(numbers.setdefault(row["worker"], len(numbers)), int(row["samples"]))
