"""What a race and its workers agree on: the settings of one run, in a folder that all of its processes read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.lib import wire
from benchmarks.versus.models import GOALS, Problem
from benchmarks.versus.outcome import Run
from benchmarks.versus.profiles import KINDS, Profile

_FILE = "setup.json"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Setup(Run):
    """A run, and how it is made.

    Attributes:
        unit: Seconds of one unit of simulated time.
        limit: Units after which the run ends.
        data: The folder of MNIST's files, if the model needs it.
        folder: The run's folder. It lies in memory, so that nobody waits for a disk.
        exchange_only: Whether the workers only exchange, without computing and sleeping: their overhead is measured.
        schedule: Rounds, or commits of whole batches, of a training to the end: a warm-up, and a cosine to 0. 0: the rate stays
            as it is, and the run ends at its loss.
        sizes: The samples of each worker's batch, which takes that share of its time; 0: it takes no part. Empty: all whole.
        first: How many gradients of a round are used; only with backup workers.
        settings: More settings of this server.
    """

    unit: float
    limit: float
    data: str | None
    folder: str
    exchange_only: bool = False
    schedule: float = 0.0
    sizes: tuple[int, ...] = ()
    first: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def kind(self) -> Profile:
        return KINDS[self.profile]

    @property
    def optimizer(self) -> str:
        return "adamw" if self.schedule else GOALS[self.model].optimizer

    @property
    def losses(self) -> tuple[float, float]:
        return GOALS[self.model].losses

    def problem(self) -> Problem:
        """The model and its data, loaded once in a process and those forked from it."""
        return _problem(self.model, self.data)

    def size(self, worker: int) -> int:
        """The samples of a worker's batch."""
        return self.sizes[worker] if self.sizes else self.problem().batch_size

    @property
    def members(self) -> list[int]:
        """The workers that take part."""
        return [worker for worker in range(self.workers) if not self.sizes or self.sizes[worker]]

    @property
    def host(self) -> str:
        """The address where all workers reach the others and the server."""
        return wire.NEAR if self.kind.far else "127.0.0.1"

    def take_place(self, worker: int) -> None:
        """Moves this process behind the slow link if the worker belongs there. Call this before it opens a connection."""
        if worker >= self.workers - self.kind.far:
            wire.enter(self.path)

    def save(self) -> None:
        (self.path / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Setup:
        return replace(cls(**json.loads((folder / _FILE).read_text())), folder=str(folder))


@lru_cache
def _problem(model: str, data: str | None) -> Problem:
    return GOALS[model].make(Path(data) if data else None)
