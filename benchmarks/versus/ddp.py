"""PyTorch DDP on gloo. Its processes are forked from one without threads: torchrun's agent has some when it forks, and
some starts hung."""

import os
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import wire
from benchmarks.versus.family import Family
from benchmarks.versus.pace import Gate, Pace, Publisher, elapsed, flat, set_rate
from benchmarks.versus.setup import Setup

ROUNDS_TO_AGREE = 10  # an exchange in each round would take DDP some of its time


class Ddp:
    """The processes of a run. Nobody comes back."""

    def __init__(self, setup: Setup, family: Family) -> None:
        self.members = len(setup.members)
        for rank, worker in enumerate(setup.members):
            family.start(f"worker-{worker}", _work, setup, worker, rank, self.members)


def _work(setup: Setup, worker: int, rank: int, members: int) -> None:
    """The body of a worker's process. Its rank counts those that take part."""
    torch.set_num_threads(1)
    setup.take_place(worker)
    os.environ["GLOO_SOCKET_IFNAME"] = wire.DEVICE if setup.kind.far else "lo"
    dist.init_process_group("gloo", init_method=f"file://{setup.folder / 'ranks'}", rank=rank, world_size=members)
    Loop(setup, worker).run()


class Agreed:
    """The share of the run's time that has passed when a round begins: the same on all ranks, or their models would differ.
    Every ten rounds it is what rank 0 says; in between it grows by the mean of the last ten.

    Args:
        a_round: The share that a round is expected to take at first.
    """

    def __init__(self, a_round: float) -> None:
        self._last, self._round = 0.0, a_round

    def part(self, done: int, own: float) -> float:
        """The share after `done` rounds; by this rank's clock it is `own`. All ranks must call it."""
        rounds = done % ROUNDS_TO_AGREE
        if done and not rounds:
            said = torch.tensor(own, dtype=torch.float64)
            dist.broadcast(said, 0)
            self._last, self._round = float(said), (float(said) - self._last) / ROUNDS_TO_AGREE
        return self._last + rounds * self._round


class Loop:
    """One worker's training.

    DDP's buckets hold 1 MiB and more, so these models have one, which is complete when the last gradient is. So the all-reduce
    begins when the step is due, as if computing had taken so long.
    """

    def __init__(self, setup: Setup, worker: int) -> None:
        self._setup, self._worker, self._problem = setup, worker, setup.problem()
        self._pace: Pace | None = None
        self._model = self._problem.model(setup.seed)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=setup.rate)
        self._parallel = DistributedDataParallel(self._model)
        self._parallel.register_comm_hook(None, self._reduce)
        self._size, self._used = setup.sizes[worker], sum(setup.sizes)

    def run(self) -> None:
        """Trains until the process is killed."""
        publisher, agreed, done = Publisher(self._setup), Agreed(1 / self._setup.schedule), 0
        self._compute(0)  # a first gradient, which is discarded: it opens the connections
        dist.barrier()
        start = Gate(self._setup.folder).enter(self._worker)
        self._pace = pace = Pace(self._setup, self._worker, start)
        while True:
            set_rate(self._optimizer, self._setup, done, agreed.part(done, elapsed(self._setup, start)))
            self._compute(pace.step)
            self._optimizer.step()
            done += 1
            if dist.get_rank() == 0 and publisher.due:
                publisher.publish(flat(self._model), done * self._used, done * dist.get_world_size())
            pace.begin()

    def _compute(self, step: int) -> None:
        batch = self._problem.batch(self._setup.seed, self._worker, step, self._size)
        part = self._size * dist.get_world_size() / self._used  # 1 if all batches are alike: the mean is by samples
        self._optimizer.zero_grad()
        (part * self._problem.loss(self._parallel, batch)).backward()

    # DDP reads these annotations, so they must not be text: this file lacks the import that makes them text.
    def _reduce(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if bucket.index() == 0 and self._pace is not None:
            self._pace.wait(self._size / self._problem.batch_size)
        return allreduce_hook(cast(dist.ProcessGroup, dist.group.WORLD), bucket)
