"""The base of all contenders. A contender sends P floats to a server, which applies an update rule and returns P floats."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.lib import machine
from benchmarks.lib.load import PROCESSES, LoadFailed, RoundTrip

HOST = "127.0.0.1"
WARM_UP = 3  # round trips of each worker before anything is counted
START_SECONDS = 120.0  # maximum time for one process to start
PATTERN = 1 << 20  # a gradient repeats itself after this many elements, because random numbers are slow to generate


@dataclass(frozen=True)
class Place:
    """The address and the size of one measurement.

    Attributes:
        port: A free port of the loopback interface.
        parameters: P, the number of float32 elements sent in each direction.
        workers: W, the number of workers.
        log: The file that receives its processes' output.
    """

    port: int
    parameters: int
    workers: int
    log: Path

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def redirect(self) -> None:
        """Redirects this process's output to the log."""
        with self.log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


@dataclass(frozen=True)
class Contender(ABC):
    """One row of the benchmark.

    Attributes:
        name: For `--only` and the JSON.
        label: For tables and plots.
        rule: "gem", "add" or "none".
        transport: "shm", "tcp", "tls", "grpc" or "-".
        kind: "ours", "peer" or "floor".
        of: Name that contenders share which differ in their settings alone; the fastest of them counts.
    """

    name: str
    label: str
    rule: str = "gem"
    transport: str = "tcp"
    kind: ClassVar[str] = "peer"

    @property
    def of(self) -> str:
        return self.name

    def processes(self, workers: int) -> int:
        """Number of worker processes that make round trips at the same time."""
        return workers

    @abstractmethod
    def server(self, place: Place) -> AbstractContextManager[list[int]]:
        """Starts the server, yields the ids of its processes once it accepts connections, and ends it."""

    @abstractmethod
    def worker(self, place: Place, index: int) -> AbstractContextManager[RoundTrip]:
        """Connects worker `index` (from 0) and yields a function that makes one round trip. It returns the new θ: float32,
        shape (P,)."""


class OwnProcess(Contender):
    """A contender whose server is one Python process that runs `serve`."""

    @abstractmethod
    def serve(self, place: Place, ready: Event) -> None:
        """Runs the server until the process is killed. Sets `ready` when workers may connect."""

    @contextmanager
    def server(self, place: Place) -> Iterator[list[int]]:
        ready = PROCESSES.Event()
        process = PROCESSES.Process(target=self._run, args=(place, ready))
        process.start()
        assert process.pid is not None
        try:
            await_start(ready, process)
            yield [process.pid]
        finally:
            machine.kill(machine.tree([process.pid]))
            process.join()

    def _run(self, place: Place, ready: Event) -> None:
        place.redirect()
        self.serve(place, ready)


@contextmanager
def checked_worker(contender: Contender, place: Place, index: int) -> Iterator[RoundTrip]:
    """A contender's worker, after some round trips that nobody counts. Raises LoadFailed if they don't return a θ."""
    place.redirect()
    with contender.worker(place, index) as round_trip:
        for _ in range(WARM_UP):
            _require_theta(round_trip(), place)
        yield round_trip


def _require_theta(theta: Any, place: Place) -> None:
    """Raises LoadFailed unless θ has the shape and values that every contender must return. A list (the frames of a bare echo)
    is accepted as it is."""
    if isinstance(theta, list):
        return
    array = np.asarray(theta)
    few = array[:: 1 + array.size // 1000]
    if array.shape != (place.parameters,) or array.dtype != np.float32 or not np.isfinite(few).all():
        raise LoadFailed(f"it did not return a θ of {place.parameters} finite float32 values")


def await_start(ready: Event, process: Any) -> None:
    """Waits until a server's process is ready. Raises LoadFailed if it ends before that, or takes too long."""
    for _ in range(int(START_SECONDS)):
        if ready.wait(1):
            return
        if not process.is_alive():
            raise LoadFailed(f"its server ended with status {process.exitcode} before it was ready")
    raise LoadFailed(f"its server was not ready within {START_SECONDS:g} s")


def one_thread() -> None:
    """Limits PyTorch to one thread, as torchrun does: the processes share the cores."""
    import torch

    torch.set_num_threads(1)


def gradient(place: Place, index: int) -> npt.NDArray[np.float32]:
    """The gradient of worker `index`, the same for every contender: float32, shape (P,), normal, standard deviation 0.01."""
    pattern = np.random.default_rng(index).normal(scale=1e-2, size=min(place.parameters, PATTERN))
    return np.resize(pattern.astype(np.float32), place.parameters)
