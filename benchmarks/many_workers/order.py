"""Whose commit comes next."""

from __future__ import annotations

import csv
import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_client.run.batch_sizes import batch_sizes

from benchmarks.paper.experiments import Experiment


class Turn(NamedTuple):
    """One commit.

    Attributes:
        worker: Its number, from 0.
        samples: Size of its batch.
    """

    worker: int
    samples: int


def simulated(experiment: Experiment) -> Iterator[Turn]:
    """The turns of workers that begin together and compute all the time.

    The time for one gradient has a gamma distribution: a spread of 1 makes it exponential; 0 makes all alike, and the workers
    march in lockstep. If batches vary, the times of their gradients are in proportion.
    """
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


def recorded(commits: Path) -> Iterator[Turn]:
    """The turns of a run of the real service, from the commits.csv that it left."""
    numbers: dict[str, int] = {}
    with commits.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield Turn(numbers.setdefault(row["worker"], len(numbers)), int(row["samples"]))
