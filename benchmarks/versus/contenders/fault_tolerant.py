"""torchft (torchft 0.2): DDP that goes on without a worker that was killed. One that comes back gets the state of another."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
from gem_worker.launcher.cluster import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.versus.contenders import Contender
from benchmarks.versus.contenders.methods import RATES, optimizer_of
from benchmarks.versus.family import Family
from benchmarks.versus.pace import Gate, Pace, Publisher, flat, time_exchanges
from benchmarks.versus.setup import Setup

_HEARTBEAT_MS = 2000  # how long a silent worker counts as alive; torchft's default is 5 s
_TIMEOUT = timedelta(seconds=60)
# Of an all-reduce that a killed worker leaves hanging. The longest step takes half of it.
_REDUCE_TIMEOUT = timedelta(seconds=5)


class Replicas:
    """The processes of a run: the lighthouse, which says who takes part in a step, and the workers."""

    def __init__(self, setup: Setup, family: Family) -> None:
        self._setup, self._family, self.members = setup, family, setup.workers
        self._address = f"127.0.0.1:{free_port()}"
        family.start("lighthouse", _guide, self._address, setup)
        for worker in range(setup.workers):
            self.revive(worker)

    def revive(self, worker: int) -> None:
        self._family.start(f"worker-{worker}", _work, self._address, self._setup, worker)


def _guide(address: str, setup: Setup) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=address, min_replicas=setup.workers - 1, join_timeout_ms=60_000, quorum_tick_ms=20,
        heartbeat_timeout_ms=_HEARTBEAT_MS,
    )  # fmt: skip
    while server:
        time.sleep(1)


class _Replica:
    """A worker: its model, its optimizer, and torchft's manager."""

    def __init__(self, address: str, setup: Setup, worker: int) -> None:
        from torchft import Manager, ProcessGroupGloo

        self.model = setup.problem().model(setup.seed)
        self.optimizer = optimizer_of(setup.optimizer, self.model, setup.rate)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{address}"
        self.manager: Any = Manager(
            pg=ProcessGroupGloo(timeout=_REDUCE_TIMEOUT), load_state_dict=self._load, state_dict=self._state, timeout=_TIMEOUT,
            min_replica_size=1, replica_id=f"worker-{worker}", store_addr="127.0.0.1", store_port=store.port, rank=0,
            world_size=1, init_sync=False,
        )  # fmt: skip
        self._store = store

    def step(self, packed: torch.Tensor) -> bool:
        """Averages gradients, packed in one array, over all who take part, and makes a step if all of them agree to."""
        self.manager.allreduce(packed).wait()
        if not self.manager.should_commit():
            return False
        parameters = list(self.model.parameters())
        for parameter, part in zip(parameters, packed.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        return True

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _work(address: str, setup: Setup, worker: int) -> None:
    """The body of a worker's process."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # a few lines for each step
    problem, replica = setup.problem(), _Replica(address, setup, worker)
    if (gate := Gate(setup.path)).closed:
        _await_all(setup, worker)
        replica.manager.start_quorum()  # opens the connections; nothing is learnt
        replica.manager.allreduce(torch.zeros(1)).wait()
        replica.manager.should_commit()
    if setup.exchange_only:
        time_exchanges(setup, worker, lambda: _exchange(replica))
    pace, publisher = Pace(setup, worker, gate.enter(worker)), Publisher(setup)
    samples = exchanges = 0
    while True:
        replica.manager.start_quorum()
        replica.optimizer.zero_grad()
        problem.loss(replica.model, problem.batch(setup.seed, worker, pace.step)).backward()
        gradients = [parameter.grad.reshape(-1) for parameter in replica.model.parameters() if parameter.grad is not None]
        pace.wait()
        if replica.step(torch.cat(gradients)):
            members = replica.manager.num_participants()
            samples, exchanges = samples + members * problem.batch_size, exchanges + members
        if worker == 0 and publisher.due:
            publisher.publish(flat(replica.model), samples, exchanges)
        pace.begin()


def _await_all(setup: Setup, worker: int) -> None:
    """Waits until every worker sends heartbeats: the lighthouse then waits for all of them."""
    (setup.path / f"made-{worker}").touch()
    while sum(1 for _ in setup.path.glob("made-*")) < setup.workers:
        time.sleep(0.05)


def _exchange(replica: _Replica) -> None:
    replica.manager.start_quorum()
    replica.step(torch.from_numpy(flat(replica.model)))


CONTENDERS = {"torchft": Contender("torchft", Replicas, RATES, (8,), far=False, needs="torchft")}
