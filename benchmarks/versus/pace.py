"""What every worker of every contender does alike: it waits for the common start, takes the time that its step is given, and
publishes θ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.finals.apart import cosine
from benchmarks.versus.setup import Setup

SNAPSHOT_UNITS = 2.0  # between two published snapshots
_GATE = "go"
_POLL_SECONDS = 0.01


class Gate:
    """Holds all workers until the last one is ready. Files in the run's folder stand for the signals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, worker: int) -> float:
        """Says that a worker is ready, and waits for the start. Returns its time, which may have passed."""
        (self._folder / f"ready-{worker}").touch()
        while not (self._folder / _GATE).exists():
            time.sleep(_POLL_SECONDS)
        start = float((self._folder / _GATE).read_text())
        time.sleep(max(0.0, start - time.monotonic()))
        return start

    def ready(self) -> int:
        """How many workers are ready."""
        return sum(1 for _ in self._folder.glob("ready-*"))

    def open(self, delay: float = 0.3) -> float:
        """Gives the start signal; returns the time of the start."""
        start = time.monotonic() + delay
        unfinished = self._folder / "go.part"
        unfinished.write_text(repr(start))
        unfinished.rename(self._folder / _GATE)
        return start


class Pace:
    """Makes each step of a worker take as long as its profile says. What computing took counts.

    Args:
        setup: The run.
        worker: Its number from 0.
        start: The time of the common start. A worker that joins later continues its table of times there.
    """

    def __init__(self, setup: Setup, worker: int, start: float) -> None:
        self._times, self._unit = setup.kind.times(setup.seed, worker, setup.workers), setup.unit
        self.step = max(0, round((time.monotonic() - start) / setup.unit))
        self._began = start if self.step == 0 else time.monotonic()

    def begin(self) -> None:
        """Begins a step; the first one has begun at the start."""
        self._began = time.monotonic()

    def due(self, share: float = 1.0) -> float:
        """The time when the step's gradient is due, if it has this share of a batch."""
        return self._began + share * self._unit * self._times(self.step)

    def wait(self, share: float = 1.0) -> None:
        """Sleeps until the step's gradient is due."""
        due = self.due(share)
        self.step += 1
        time.sleep(max(0.0, due - time.monotonic()))


@dataclass(frozen=True)
class Snapshot:
    """θ at a time.

    Attributes:
        time: On the clock that all processes share.
        samples: Samples of all gradients so far, lost ones included.
        exchanges: How often a worker has exchanged so far, all workers together.
        theta: float32, shape (P,).
    """

    time: float
    samples: int
    exchanges: int
    theta: NDArray[np.float32]


class Publisher:
    """Writes a snapshot into the run's folder whenever one is due."""

    def __init__(self, setup: Setup) -> None:
        self._path, self._every, self._due = setup.folder, SNAPSHOT_UNITS * setup.unit, time.monotonic()
        self._published = 0

    @property
    def due(self) -> bool:
        return self.wait_seconds == 0

    @property
    def wait_seconds(self) -> float:
        """How long it is until the next one is due."""
        return max(0.0, self._due - time.monotonic())

    def publish(self, theta: NDArray[np.float32], samples: int, exchanges: int) -> None:
        now = time.monotonic()
        self._due = max(self._due + self._every, now)
        self._published += 1
        unfinished = self._path / "theta.part"
        with unfinished.open("wb") as file:
            np.savez(file, theta=theta, time=np.float64(now), counts=np.array([samples, exchanges]))
        unfinished.rename(self._path / f"theta-{self._published:06}.npz")


def snapshots(folder: Path) -> Iterator[Snapshot]:
    """All snapshots, in their order."""
    for path in sorted(folder.glob("theta-*.npz")):
        with np.load(path) as file:
            samples, exchanges = (int(count) for count in file["counts"])
            yield Snapshot(float(file["time"]), samples, exchanges, file["theta"])


def elapsed(setup: Setup, start: float) -> float:
    """The share of the run's time that has passed since its start."""
    return (time.monotonic() - start) / (setup.unit * setup.limit)


def set_rate(optimizer: torch.optim.Optimizer, setup: Setup, done: int, part: float) -> None:
    """Sets the learning rate of a round after `done` others, which begins when this share of the run's time has passed. By the
    time the cosine ends with the run, however many rounds exchanges leave time for."""
    gone = done if setup.by_rounds else part * setup.schedule
    for group in optimizer.param_groups:
        group["lr"] = setup.rate * cosine(gone, setup.schedule)


def flat(model: nn.Module) -> NDArray[np.float32]:
    """The parameters in one array."""
    with torch.no_grad():
        packed: NDArray[np.float32] = torch.cat([parameter.reshape(-1) for parameter in model.parameters()]).numpy()
    return packed
