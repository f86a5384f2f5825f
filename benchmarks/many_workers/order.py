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


def simulated(
    workers: int, steps: int, batch: int, spread: float, varied: float, random: np.random.Generator
) -> Iterator[Turn]:
    """The turns of workers that begin together and compute all the time.

    Args:
        workers: How many.
        steps: Commits of each.
        batch: Mean samples of a batch.
        spread: Standard deviation of the time for one gradient, as a share of its mean; the distribution is a gamma
            distribution. 1 makes it exponential; 0 makes all alike, and the workers march in lockstep.
        varied: The run's batch variation: batches have between (1 − varied) and (1 + varied) times `batch` samples, and the
            times of their gradients are in proportion.
        random: The source of randomness.
    """
    shard = Hyperparameters(batch_size=batch, batch_variation=varied).default_shard_size
    sizes: list[list[int]] = [[] for _ in range(workers)]

    def begin(number: int, now: float) -> tuple[float, int, int]:
        sizes[number] = sizes[number] or batch_sizes(shard, batch, varied, random)
        samples = sizes[number].pop()
        seconds = random.gamma(1 / spread**2, spread**2) if spread else 1.0
        return now + seconds * samples / batch, number, samples

    running = [begin(number, 0.0) for number in range(workers)]
    left = [steps] * workers
    heapq.heapify(running)
    while running:
        now, number, samples = heapq.heappop(running)
        yield Turn(number, samples)
        left[number] -= 1
        if left[number]:
            heapq.heappush(running, begin(number, now))


def turns_of(experiment: Experiment) -> Iterator[Turn]:
    """The turns of a simulated experiment."""
    return simulated(
        experiment.workers, experiment.commits_each, experiment.batch_size, experiment.spread, experiment.batch_variation,
        np.random.default_rng([1, experiment.seed]),
    )  # fmt: skip


def recorded(commits: Path) -> Iterator[Turn]:
    """The turns of a run of the real service, from the commits.csv that it left."""
    numbers: dict[str, int] = {}
    with commits.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield Turn(numbers.setdefault(row["worker"], len(numbers)), int(row["samples"]))
