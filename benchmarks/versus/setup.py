"""What a race and its workers agree on: the settings of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.lib import wire
from benchmarks.versus.models import MODELS, Problem
from benchmarks.versus.profiles import KINDS, Profile


@dataclass(frozen=True)
class Setup:
    """A race.

    Attributes:
        contender: "gem" or "ddp".
        model, profile: Keys of MODELS and KINDS.
        workers: How many.
        rate: The learning rate.
        seed: Of the first θ, the batches and the times.
        limit: Units after which the run ends.
        data: The folder of MNIST's files, if the model needs it.
        folder: The run's folder. It lies in memory, so that nobody waits for a disk.
        schedule: Rounds, or commits of whole batches, of a warm-up and a cosine to 0, if exchanges cost nothing.
        by_rounds: Whether rounds go through the schedule by their number, not by the time.
        sizes: The samples of each worker's batch, which takes that share of its time; 0: it takes no part.
        first: How many gradients of a round are used; only with backup workers.
        settings: More settings of this server.
    """

    contender: str
    model: str
    workers: int
    profile: str
    rate: float
    seed: int
    limit: float
    data: Path | None
    folder: Path
    schedule: float
    sizes: Sequence[int]
    first: int = 0
    by_rounds: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Profile:
        return KINDS[self.profile]

    @property
    def unit(self) -> float:
        """Seconds of one unit of simulated time."""
        return self.problem().unit_seconds * self.kind.unit

    def problem(self) -> Problem:
        """The model and its data, loaded once in a process and those forked from it."""
        return _problem(self.model, self.data)

    @property
    def members(self) -> list[int]:
        """The workers that take part."""
        return [worker for worker in range(self.workers) if self.sizes[worker]]

    @property
    def host(self) -> str:
        """The address where all workers reach the others and the server."""
        return wire.NEAR if self.kind.far else "127.0.0.1"

    def take_place(self, worker: int) -> None:
        """Moves this process behind the slow link if the worker belongs there. Call this before it opens a connection."""
        if worker >= self.workers - self.kind.far:
            wire.enter(self.folder)


@lru_cache
def _problem(model: str, data: Path | None) -> Problem:
    return MODELS[model](data)
