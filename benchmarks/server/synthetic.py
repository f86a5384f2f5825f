"""Synthetic workers: sessions that sleep instead of computing, and note when each commit was answered and how stale it was."""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gem_client import connect

from benchmarks import machine
from benchmarks.processes import split_evenly

Column = npt.NDArray[np.float64]
_START_SECONDS = 300.0  # within which all sessions must have joined


@dataclass(frozen=True)
class Work:
    """What the workers do.

    Attributes:
        parameters: P, the number of float32 values in a gradient.
        workers: Number of sessions, each in a thread of its own.
        compute_seconds: Mean time that a worker sleeps before each commit.
        spread: Standard deviation of that time, relative to its mean.
        shared_memory: Whether tensors travel through shared memory; otherwise over TCP.
    """

    parameters: int
    workers: int
    compute_seconds: float = 0.0
    spread: float = 0.1
    shared_memory: bool = False


@dataclass(frozen=True)
class Seen:
    """The commits that were answered in the measured time.

    Attributes:
        seconds: Length of that time.
        round_trip: Seconds that each commit took. Shape (commits,).
        staleness: τ of each commit. Shape (commits,).
        computed: Seconds that the worker really slept before each commit. Shape (commits,).
        over_grpc: Number of workers whose commits went over gRPC, because they could not open a lane in time.
        server_cpu: Seconds of processor time of the server for each commit.
    """

    seconds: float
    round_trip: Column
    staleness: Column
    computed: Column
    over_grpc: int
    server_cpu: float

    @property
    def rate(self) -> float:
        """Commits per second of all workers together."""
        return len(self.round_trip) / self.seconds


def observe(address: str, pid: int, work: Work, warm_up: float, seconds: float, processes: int = 2) -> Seen:
    """Lets the workers commit, and looks at them for some seconds after a warm-up that does not count.

    Args:
        address: The server's address.
        pid: Its process.
        work: What the workers do.
        warm_up, seconds: How long they do it before they are measured, and while they are.
        processes: Number of processes that hold the workers.
    """
    context = mp.get_context("spawn")
    counts = split_evenly(work.workers, processes)
    results, stop = context.Queue(), context.Event()
    ready = context.Barrier(len(counts) + 1)
    clients = [
        context.Process(target=_client, args=(address, work, count, number, ready, stop, results))
        for number, count in enumerate(counts)
    ]
    for client in clients:
        client.start()
    ready.wait(_START_SECONDS)
    time.sleep(warm_up)
    begin, used = time.monotonic(), machine.cpu_seconds([pid])  # one clock for all processes of a machine
    time.sleep(seconds)
    end, used = time.monotonic(), machine.cpu_seconds([pid]) - used
    stop.set()
    gathered, over_grpc = zip(*(results.get() for _ in clients), strict=True)
    commits = np.concatenate(gathered)
    for client in clients:
        client.join()
    answered = commits[:, 0]
    round_trip, staleness, computed = commits[(begin <= answered) & (answered < end), 1:].T
    return Seen(end - begin, round_trip, staleness, computed, sum(over_grpc), used / max(1, len(round_trip)))


def _client(address: str, work: Work, count: int, number: int, ready: Any, stop: Any, results: Any) -> None:
    """A process with `count` of the workers. It sends an array with a row for each commit (when it was answered, seconds of its
    round trip, its staleness, seconds of sleep before it), and how many workers use gRPC."""
    gradient = np.full(work.parameters, 1e-6, np.float32)
    joined, left, go = threading.Barrier(count + 1), threading.Barrier(count + 1), threading.Event()
    rows: list[list[tuple[float, float, int, float]]] = [[] for _ in range(count)]
    transports: list[str] = []

    def run(index: int) -> None:
        generator = np.random.default_rng([number, index])
        shape = max(work.spread, 1e-3) ** -2
        with connect(address, shared_memory=work.shared_memory) as session:
            session.join({"theta": np.zeros(work.parameters, np.float32)})
            session.commit(gradient)
            joined.wait()
            go.wait()
            answered = time.monotonic()
            time.sleep(generator.random() * work.compute_seconds)  # workers begin at different moments
            while not stop.is_set():
                if work.compute_seconds:
                    time.sleep(work.compute_seconds * generator.gamma(shape, 1 / shape))
                sent = time.monotonic()
                answer = session.commit(gradient)
                computed, answered = sent - answered, time.monotonic()
                rows[index].append((answered, answered - sent, answer.staleness, computed))
            transports.append(session.transport)
            left.wait()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    joined.wait()
    ready.wait(_START_SECONDS)
    go.set()
    left.wait()
    for thread in threads:
        thread.join()
    commits = np.array([row for each in rows for row in each], np.float64).reshape(-1, 4)
    results.put((commits, transports.count("grpc")))
