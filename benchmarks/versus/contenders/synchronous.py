"""Training in which workers wait for each other, on gloo: the loop that DDP, Local SGD and DiLoCo share."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.versus.contenders import Contender
from benchmarks.versus.contenders.methods import RATES, Ddp, DiLoCo, LocalSgd, Method, set_rate
from benchmarks.versus.contenders.torchrun import Torchrun, checkpoint_path
from benchmarks.versus.family import Family
from benchmarks.versus.pace import Gate, Pace, Publisher, flat, last_snapshot, time_exchanges
from benchmarks.versus.setup import Setup

_CHECKPOINT_UNITS = 10.0
Make = Callable[[nn.Module, str, float, Callable[[], None]], Method]


class Loop:
    """One worker's training."""

    def __init__(self, setup: Setup, worker: int, make: Make) -> None:
        self._setup, self._worker, self._problem = setup, worker, setup.problem()
        self._pace: Pace | None = None
        self._method = make(self._problem.model(setup.seed), setup.optimizer, setup.rate, self._wait)
        self._publisher, self._leads = Publisher(setup), dist.get_rank() == 0
        self._world, self._steps = dist.get_world_size(), 0
        self._size, self._used = setup.size(worker), sum(map(setup.size, setup.members))
        self._saved = time.monotonic()

    def run(self) -> None:
        """Trains until the process is killed, from the checkpoint if there is one."""
        self._resume()
        self._compute(0)  # a first gradient, which is discarded: it opens the connections
        dist.barrier()
        if self._setup.exchange_only:
            time_exchanges(self._setup, self._worker, self._method.exchange)
        self._pace = pace = Pace(self._setup, self._worker, Gate(self._setup.path).enter(self._worker))
        while True:
            self._compute(pace.step)
            set_rate(self._method.optimizer, self._setup, self._resumed + self._steps)
            self._method.step()
            self._steps += 1
            if self._leads:
                self._keep()
            pace.begin()

    def _compute(self, step: int) -> None:
        batch = self._problem.batch(self._setup.seed, self._worker, step, self._size)
        part = self._size * self._world / self._used  # 1 if all batches are alike: the mean is by samples, not by workers
        self._method.gradient(lambda model: part * self._problem.loss(model, batch))

    def _wait(self) -> None:
        if self._pace is not None:
            self._pace.wait(self._size / self._problem.batch_size)

    def _keep(self) -> None:
        """Publishes θ and writes a checkpoint, if they are due."""
        if self._publisher.due and self._steps % self._method.every == 0:  # in between, workers have different models
            exchanges = self._steps // self._method.every * self._world
            samples = self._steps * self._used
            self._publisher.publish(flat(self._method.model), self._samples + samples, self._exchanges + exchanges)
        if self._setup.kind.killed_every and time.monotonic() - self._saved >= _CHECKPOINT_UNITS * self._setup.unit:
            self._saved = time.monotonic()
            path = checkpoint_path(self._setup)
            torch.save(self._method.state() | {"steps": self._resumed + self._steps}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)

    def _resume(self) -> None:
        last = last_snapshot(self._setup.path)
        self._samples, self._exchanges = (last.samples, last.exchanges) if last else (0, 0)
        self._resumed = 0
        if checkpoint_path(self._setup).exists():
            state = torch.load(checkpoint_path(self._setup))
            self._resumed = state["steps"]
            self._method.load(state)


def work(make: Make, setup: Setup, worker: int) -> None:
    """The body of a worker's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Loop(setup, worker, make).run()


def _start(make: Make, setup: Setup, family: Family) -> Torchrun:
    return Torchrun(setup, family, partial(work, make))


CONTENDERS = {
    "ddp": Contender("PyTorch DDP", partial(_start, Ddp), RATES),
    "local-sgd": Contender("Local SGD, 8 steps", partial(_start, LocalSgd), RATES, (8,)),
    "diloco": Contender("DiLoCo, 16 steps", partial(_start, DiLoCo), RATES, (8,)),
    "torchft": Contender("torchft", None, RATES, (8,), far=False),
}
