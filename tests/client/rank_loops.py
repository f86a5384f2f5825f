"""Loops of a worker that is one process or several ranks, and a script for torchrun that runs them one after the other."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from client.torch_helpers import flat
from gem_client import Admin, GemError, connect
from gem_client.torch import Optimizer, ShardSampler, connect_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

EVEN, UNEVEN = 64, 23  # samples: in whole batches, and not
ACCUMULATED = 3


class Sine(Dataset[tuple[int, Tensor, Tensor]]):
    """Pairs (x, sin x), with their index."""

    def __init__(self, size: int) -> None:
        self._x = torch.linspace(-3, 3, size).unsqueeze(1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self._x[index], torch.sin(self._x[index])


class Worker:
    """A worker that trains a network: alone, or as one of the ranks of a `group`."""

    def __init__(self, address: str, group: Any, make: Callable[..., Any], **settings: Any) -> None:
        torch.manual_seed(0)
        self._address = address
        self.plain = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.model: Any = self.plain if group is None else DistributedDataParallel(self.plain, process_group=group)
        self.session: Any = connect(address) if group is None else connect_ranks(address, self.model)
        self.optimizer = Optimizer(make(self.model), self.session, **settings)
        self.sampler: Any = None
        self.seen: list[int] = []
        self.spoil = False

    def train(self, samples: int, accumulated: int = 1, loaders: int = 0) -> dict[str, Any]:
        """Trains to the end of the run, by epochs; returns what happened."""
        self.sampler, epochs, batches = ShardSampler(self.session, Sine(samples)), [], 0
        length = len(self.sampler)
        for epoch in self.sampler.epochs():
            epochs.append(epoch.number)
            for number, batch in enumerate(epoch.loader(num_workers=loaders), 1):
                batches += 1
                self.compute(batch, steps=number % accumulated == 0, accumulated=accumulated)
            self.optimizer.finish()
            self.optimizer.zero_grad()
        self.optimizer.load_final()
        told: dict[str, Any] = {
            "version": self.session.version,
            "complete": self.sampler.complete,
            "is_first": self.session.is_first,
        }
        with Admin(self._address) as admin:
            told["loss"] = admin.status().training_loss
        self.session.__exit__(None, None, None)
        return told | {
            "theta": flat(self.plain).tolist(),
            "seen": self.seen, "epochs": epochs, "batches": batches, "length": length,
        }  # fmt: skip

    def compute(self, batch: Any, steps: bool, accumulated: int) -> None:
        """Computes a batch's gradient, and makes a step of it and those before it."""
        index, inputs, targets = batch
        self.seen += index.tolist()
        held_back = not steps and isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if held_back else nullcontext():
            loss = nn.functional.mse_loss(self.model(inputs), targets) / accumulated
            (loss * float("nan") if self.spoil else loss).backward()
        if steps:
            self.optimizer.step(loss=loss * accumulated)
            self.optimizer.zero_grad()


def named(model: nn.Module) -> Any:
    """Names without DistributedDataParallel's prefix are found by the SDK itself."""
    return model.parameters() if isinstance(model, DistributedDataParallel) else model.named_parameters()


def of_adamw(address: str, group: Any, **settings: Any) -> dict[str, Any]:
    def make(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.named_parameters(), lr=0.01, weight_decay=0.1)

    return Worker(address, group, make, **settings).train(EVEN)


def sgd(address: str, group: Any) -> dict[str, Any]:
    return Worker(address, group, named).train(EVEN)


def overlapping(address: str, group: Any) -> dict[str, Any]:
    return Worker(address, group, named, overlap=True).train(EVEN)


def adamw_of_server(address: str, group: Any) -> dict[str, Any]:
    return of_adamw(address, group)


def adamw_of_worker(address: str, group: Any) -> dict[str, Any]:
    return of_adamw(address, group, on="worker")


def accumulating(address: str, group: Any) -> dict[str, Any]:
    return Worker(address, group, named, batches_per_step=ACCUMULATED).train(EVEN, ACCUMULATED)


def uneven(address: str, group: Any) -> dict[str, Any]:
    return Worker(address, group, named).train(UNEVEN)


def reading_ahead(address: str, group: Any) -> dict[str, Any]:
    return Worker(address, group, named).train(UNEVEN, loaders=1)


def failing(address: str, group: Any) -> dict[str, Any]:
    """The last rank's second gradient is no number. Later another worker takes the name."""
    worker = Worker(address, group, named)
    batches = iter(ShardSampler(worker.session, Sine(EVEN)).loader())
    errors = []
    for step in range(4):
        worker.spoil = step == 1 and dist.get_rank(group) == dist.get_world_size(group) - 1
        if step == 3 and dist.get_rank(group) == 0:
            other = connect(address, name=worker.session.name)
            other.join({name: parameter.detach().numpy() for name, parameter in worker.plain.named_parameters()})
        try:
            worker.compute(next(batches), True, 1)
            errors.append("")
        except GemError as error:
            errors.append(f"{type(error).__name__} {getattr(error, 'reason', '')}".strip())
            worker.optimizer.zero_grad()
    return {"errors": errors}


def losing(address: str, group: Any) -> dict[str, Any]:
    """A rank is killed after two steps. Rank 0 does not come to deal the next batch, rank 1 not to its `backward`."""
    worker, rank = Worker(address, group, named), dist.get_rank(group)
    with worker.session:
        for step, batch in enumerate(ShardSampler(worker.session, Sine(EVEN)).loader()):
            if step == 2 and rank == int(os.environ["KILLED"]) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            worker.compute(batch, True, 1)
            if step == 1 and rank == int(os.environ["KILLED"]) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return {}


LOOPS = (
    sgd, overlapping, adamw_of_server, adamw_of_worker, accumulating, uneven, reading_ahead, failing, losing,
)  # fmt: skip


def main(folder: str, *plan: str) -> None:
    """Runs loops: each argument is "NAME RANKS ADDRESS". Each rank writes its results into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), []
    world = dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    groups = {2: pairs[0], world: dist.group.WORLD}
    loops = {loop.__name__: loop for loop in LOOPS}
    for name, ranks, address in (each.split() for each in plan):
        if rank < int(ranks):
            results.append(loops[name](address, groups[int(ranks)]))
        else:
            results.append({})
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
