"""Helpers of the tests of sessions with several servers: the servers of a run, and a run that repeats to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import Range
from gem_client import Session
from kit.model import Array, theta
from kit.regions import abstract
from kit.server import Live, config

SHAPES = {"w": (100, 99), "b": (7,), "v": (4001,)}  # 13,908 parameters: enough for three servers, none whole but "b"
SIZE = 13_908
GRADIENT: Array = np.full(SIZE, 0.5, np.float32)


def large_model(seed: int = 0) -> dict[str, Array]:
    """A model that three servers can share."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


class Ranges:
    """The running servers of one run, range 0 first. One server holds everything, and needs no log.

    Args:
        folder: Where each keeps its checkpoints and its log.
        count: How many there are.
        settings: The run's hyper-parameters.
        reach: Changes an address of a range to the one that workers get; None: it stays.
        memory: Whether the servers share memory.
        changes: Of their configuration.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        settings: Hyperparameters | None = None,
        reach: Callable[[int, Live], str] | None = None,
        memory: bool = False,
        **changes: Any,
    ) -> None:
        self._base = config(settings, durability="log" if count > 1 else "snapshot", **changes)
        self._folder, self._memory = folder, memory
        reach = reach or (lambda _, live: live.address)
        peers: list[Live] = []
        try:
            for index in range(1, count):
                peers.append(self._start(Range(index, count)))
            addresses = tuple(reach(index, live) for index, live in enumerate(peers, 1))
            self.lives = [self._start(Range(0, count), addresses), *peers]
        except BaseException:
            for live in peers:
                live.stop()
            raise

    def _start(self, part: Range, peers: tuple[str, ...] = ()) -> Live:
        socket = abstract() if self._memory else ""
        folder = self._folder / str(part.index)
        return Live(replace(self._base, range=part, peers=peers, checkpoint_dir=folder, memory_socket=socket))

    @property
    def address(self) -> str:
        """The address of the server that leads."""
        return self.lives[0].address

    @property
    def theta(self) -> Array:
        """A copy of the whole central variable."""
        return np.concatenate([theta(live) for live in self.lives])

    def each(self, look: Callable[[Live], Any]) -> list[Any]:
        """What `look` says of each server."""
        return [look(live) for live in self.lives]

    def back(self, index: int, **changes: Any) -> None:
        """Starts a server that was stopped again, at the same address, with its folder; or with these changes."""
        live = self.lives[index]
        socket = abstract() if self._memory else ""
        changes = {"resume": True, "listen": live.address, "memory_socket": socket, **changes}
        self.lives[index] = Live(replace(live.config, **changes))

    def stop(self) -> None:
        for live in self.lives:
            live.stop()


@contextmanager
def ranges(folder: Path, count: int, settings: Hyperparameters | None = None, **changes: Any) -> Iterator[Ranges]:
    """Runs the servers during a `with` block."""
    run = Ranges(folder, count, settings, **changes)
    try:
        yield run
    finally:
        run.stop()


def gradients(seed: int = 1) -> Iterator[Callable[[Array], Array]]:
    """Gradients that depend on θ, the same for each run."""
    random = np.random.default_rng(seed)
    while True:
        noise = random.standard_normal(SIZE).astype(np.float32)
        yield lambda theta, noise=noise: np.float32(0.1) * theta + noise  # type: ignore[misc]


def train(session: Session, first: Array, commits: int = 5) -> Array:
    """Makes commits, each with a gradient at the θ of the one before. Returns a copy of the last θ."""
    theta = first
    for _, gradient in zip(range(commits), gradients(), strict=False):
        theta = session.commit(gradient(theta), samples=4).theta
    return theta.copy()
