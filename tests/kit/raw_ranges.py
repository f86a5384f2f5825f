"""Raw clients of several servers that hold a model together: each range has its own calls, in any order that a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.ranges import Range
from gem_api.v1 import training_pb2 as pb

from kit.raw_client import Wire, Worker
from kit.server import Live, config, serving
from kit.ways import wired

TWO = Layout.of({"w": (3, 2500), "b": (700,), "empty": (0, 4)})  # 8,200 parameters: w is cut by two ranges
SUMS = Hyperparameters(rule="downpour", learning_rate=1.0)  # θ ← θ − g


class Ranges:
    """Running servers of all ranges of a model, and a raw client for each."""

    def __init__(self, lives: list[Live], wires: list[Wire]) -> None:
        self.lives = lives
        self.wires = wires

    def join(self, name: str, layout: Layout = TWO) -> list[Worker]:
        """Registers a worker with the leader, then with the others: one worker for each range, with the same lease."""
        request = pb.RegisterWorkerRequest(worker_name=name, layout=layout.to_message())
        first = self.wires[0].call("RegisterWorker", request)
        request.lead.lease_id, request.lead.run_id = first.lease_id, first.run_id
        request.lead.hyperparameters.CopyFrom(first.hyperparameters)
        answers = [first, *(wire.call("RegisterWorker", request) for wire in self.wires[1:])]
        workers = [Worker(wire, answer) for wire, answer in zip(self.wires, answers, strict=True)]
        for worker in workers:
            worker.size = worker.registration.layout.range_end - worker.registration.layout.range_begin
        return workers

    def started(self, name: str, layout: Layout = TWO, value: float = 0.0) -> list[Worker]:
        """Registers the first worker, which gives every element of θ the value `value`, and pulls."""
        workers = self.join(name, layout)
        for worker in workers:
            worker.initialize(np.full(worker.size, value, np.float32))
            worker.pull()
        return workers

    def joined(self, name: str, layout: Layout = TWO) -> list[Worker]:
        """Registers another worker, and pulls."""
        workers = self.join(name, layout)
        for worker in workers:
            worker.pull()
        return workers

    def sequences(self, index: int) -> dict[str, int]:
        """The last applied commit of each worker."""
        live = self.lives[index]
        return live.on_loop(lambda: {lease.worker: lease.sequence for lease in live.core.leases.live.values()})


def commit_all(workers: list[Worker], value: float = 1.0) -> None:
    """One commit, sent to all ranges at the same time."""
    threads = [threading.Thread(target=worker.commit, args=(value,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def range_config(folder: Path, part: Range, settings: Hyperparameters = SUMS, **changes: Any) -> Any:
    """The configuration of one range's server, with its checkpoints in folder/range-I."""
    changes = {"durability": "log", **changes}
    return config(settings, checkpoint_dir=folder / f"range-{part.index}", range=part, **changes)


@contextmanager
def serving_ranges(
    folder: Path, count: int = 2, settings: Hyperparameters = SUMS, way: str = "grpc", **changes: Any
) -> Iterator[Ranges]:
    """Runs the servers of all ranges during a `with` block."""
    with ExitStack() as opened:
        lives: list[Live] = []
        for index in [*range(1, count), 0]:
            peers = () if index or count == 1 else tuple(live.address for live in lives)
            lives.append(
                opened.enter_context(serving(range_config(folder, Range(index, count), settings, peers=peers, **changes)))
            )
        lives = [lives[-1], *lives[:-1]]
        yield Ranges(lives, [opened.enter_context(wired(live, way)) for live in lives])
