"""Synchronous training with backup workers (Chen et al. 2016), which DDP can't: of each round's gradients, the first few are
used, and who is late gives its own up. The processes share memory on this machine; pipes say whose turn it is."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawArray
from time import monotonic
from typing import cast

import numpy as np
import torch
from gem_api.layout import Vector
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.versus.family import Family
from benchmarks.versus.pace import Gate, Pace, Publisher, elapsed, flat, set_rate
from benchmarks.versus.setup import Setup


class Backups:
    """The processes of a run: the workers, and one that makes the steps. Nobody comes back."""

    def __init__(self, setup: Setup, family: Family) -> None:
        self.members = setup.workers + 1
        size = flat(setup.problem().model(setup.seed)).size
        theta, gradients = _shared(size), [_shared(size) for _ in range(setup.workers)]
        pipes = [Pipe() for _ in range(setup.workers)]
        family.start("steps", _make_steps, setup, theta, gradients, [ours for ours, _ in pipes])
        for worker, (_, theirs) in enumerate(pipes):
            family.start(f"worker-{worker}", _work, setup, worker, theta, gradients[worker], theirs)


def _shared(size: int) -> Vector:
    return np.ctypeslib.as_array(RawArray(ctypes.c_float, size))


def _make_steps(setup: Setup, theta: Vector, gradients: Sequence[Vector], pipes: Sequence[Connection]) -> None:
    torch.set_num_threads(1)
    problem = setup.problem()
    model = problem.model(setup.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.rate)
    start = Gate(setup.folder).enter(setup.workers)
    publisher = Publisher(setup)
    for done in count():
        theta[:] = flat(model)
        set_rate(optimizer, setup, done, elapsed(setup, start))
        for pipe in pipes:
            pipe.send(done)
        first = _first(pipes, done, setup.first)
        _set_gradient(model, np.mean([gradients[worker] for worker in first], axis=0))
        optimizer.step()
        if publisher.due:
            publisher.publish(flat(model), (done + 1) * setup.first * problem.batch_size, (done + 1) * setup.first)


def _first(pipes: Sequence[Connection], done: int, most: int) -> list[int]:
    """The workers whose gradients of this round are the first. Those of earlier rounds are too late."""
    found: list[int] = []
    while len(found) < most:
        for pipe in wait(pipes):
            if cast(Connection, pipe).recv() == done and len(found) < most:
                found.append(pipes.index(cast(Connection, pipe)))
    return found


def _set_gradient(model: nn.Module, gradient: Vector) -> None:
    parameters = list(model.parameters())
    parts = torch.from_numpy(gradient).split([each.numel() for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def _work(setup: Setup, worker: int, theta: Vector, gradient: Vector, pipe: Connection) -> None:
    """The body of a worker's process. It writes its gradient before it says so, and θ is not written while it is waited for."""
    torch.set_num_threads(1)
    problem = setup.problem()
    model = problem.model(setup.seed)
    problem.loss(model, problem.batch(setup.seed, worker, 0)).backward()  # a first gradient, which is discarded
    pace = Pace(setup, worker, Gate(setup.folder).enter(worker))
    while True:
        pace.step = pipe.recv()
        while pipe.poll():
            pace.step = pipe.recv()
        pace.begin()
        vector_to_parameters(torch.from_numpy(theta.copy()), model.parameters())
        model.zero_grad()
        problem.loss(model, problem.batch(setup.seed, worker, pace.step)).backward()
        if pipe.poll(max(0.0, pace.due() - monotonic())):
            continue  # the round is over
        gradient[:] = parameters_to_vector([cast(torch.Tensor, each.grad) for each in model.parameters()]).numpy()
        pipe.send(pace.step)
