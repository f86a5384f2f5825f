"""This server, with the optimizer on it: a server process, and workers that use the SDK as any training loop does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableSequence, Sequence
from multiprocessing.sharedctypes import RawArray

import gem_client
import torch
from gem_api.process.options import as_environment
from gem_client.torch import Optimizer
from gem_worker.launcher.cluster import WORKER_NICENESS, free_port

from benchmarks.versus.contenders import Contender
from benchmarks.versus.family import DIVERGED, Family
from benchmarks.versus.pace import Gate, Pace, Publisher, time_exchanges
from benchmarks.versus.setup import Setup

_POLL_SECONDS = 0.02


# Flags of the server, by the model's optimizer, and settings: as before workers were kept in step, when the races were run.
FLAGS = {"adamw": ("--rule=gem:growth=0", "--optimizer=adamw"), "sgd": ("--rule=gem",)}
_SETTINGS = {"smallest_share": 1, "reply_wait": 0}
_RATES = {"adamw": (0.001, 0.002, 0.003, 0.006), "sgd": (0.025, 0.05, 0.1, 0.2)}


class Ours:
    """The processes of a run: the server, the workers, and one that reads θ as an evaluator does."""

    members: int

    def __init__(self, setup: Setup, family: Family) -> None:
        self._setup, self._family, self.members = setup, family, setup.workers + 1
        self._address = f"{setup.host}:{free_port()}"
        self._samples = RawArray("q", setup.workers)  # committed by each worker; the processes share it
        family.start("server", _serve, self._address, setup)
        for worker in range(setup.workers):
            self.revive(worker)
        family.start("reader", _read, self._address, setup, self._samples)

    def revive(self, worker: int) -> None:
        self._family.start(f"worker-{worker}", _work, self._address, self._setup, worker, self._samples)


def _serve(address: str, setup: Setup) -> None:
    command = [sys.executable, "-m", "gem_server", f"--listen={address}", "--metrics-listen=", "--until-stopped"]
    command += [*FLAGS[setup.optimizer], f"--learning-rate={setup.rate}", f"--batch-size={setup.problem().batch_size}"]
    command += ["--shards=replicate", f"--seed={setup.seed}"]
    command += [f"--rule={setup.settings['rule']}"] if "rule" in setup.settings else []  # the last one holds
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
    settings = {**_SETTINGS, "lane_listen": f"{setup.host}:0", **setup.settings}
    os.execvpe(command[0], command, environment | as_environment(settings))


def _work(address: str, setup: Setup, worker: int, samples: MutableSequence[int]) -> None:
    """The body of a worker's process."""
    torch.set_num_threads(1)
    os.nice(WORKER_NICENESS)  # as gem-train does
    setup.take_place(worker)
    problem = setup.problem()
    model = problem.model(setup.seed)
    with gem_client.connect(address) as session:
        optimizer = Optimizer(model.named_parameters(), session)
        problem.loss(model, problem.batch(setup.seed, worker, 0)).backward()  # a first gradient, which is discarded
        if setup.exchange_only:
            time_exchanges(setup, worker, optimizer.step)
        pace = Pace(setup, worker, Gate(setup.path).enter(worker))
        while True:
            optimizer.zero_grad()
            size = max(2, round(session.batch_share * problem.batch_size))  # as the SDK does
            loss = problem.loss(model, problem.batch(setup.seed, worker, pace.step, size))
            loss.backward()
            pace.wait(share := size / problem.batch_size)
            _commit(optimizer, loss, share)
            samples[worker] += size
            pace.begin()


def _commit(optimizer: Optimizer, loss: torch.Tensor, share: float) -> None:
    try:
        optimizer.step(loss=loss, share=share)
    except gem_client.NonFiniteGradient as error:
        print(error)
        sys.exit(DIVERGED)


def _read(address: str, setup: Setup, samples: Sequence[int]) -> None:
    """Publishes what an evaluator gets."""
    with gem_client.connect(address) as session:
        while not _initialized(session):
            time.sleep(_POLL_SECONDS)
        Gate(setup.path).enter(setup.workers)
        publisher = Publisher(setup)
        while True:
            theta = session.pull()
            publisher.publish(theta, sum(samples), session.version)
            time.sleep(publisher.wait_seconds)


def _initialized(session: gem_client.Session) -> bool:
    """Whether the server has a model."""
    try:
        session.pull()
    except gem_client.NotInitialized:
        return False
    return True


CONTENDERS = {"gem": Contender("this server", Ours, _RATES)}
