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

from benchmarks.versus.family import DIVERGED, Family
from benchmarks.versus.pace import Gate, Pace, Publisher
from benchmarks.versus.setup import Setup

_POLL_SECONDS = 0.02


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
    command += ["--optimizer=adamw", f"--learning-rate={setup.rate}", f"--batch-size={setup.problem().batch_size}"]
    command += ["--shards=replicate", f"--seed={setup.seed}"]
    settings = {"lane_listen": f"{setup.host}:0", **setup.settings}
    os.execvpe(command[0], command, os.environ | as_environment(settings))


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
        pace = Pace(setup, worker, Gate(setup.folder).enter(worker))
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
        Gate(setup.folder).enter(setup.workers)
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
