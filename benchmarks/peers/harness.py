"""One measurement: a server and W worker processes that take turns as fast as they can, all at once, for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
from gem_worker.launcher.cluster import free_port

from benchmarks import machine
from benchmarks.peers.contenders.base import PROCESSES, Contender, ContenderFailedError, Place, RoundTrip

WARM_UP = 3  # turns of each worker before anything is counted
MIN_TURNS = 3  # that each worker makes while it is measured, however long they take
PATIENCE = 300.0  # seconds without news of any worker


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        rate: Turns per second, all workers together.
        turns: Turns that were counted.
        server_cpu, worker_cpu: Seconds of processor time per turn: in the server, in the worker that takes it.
        p50, p99: Seconds that a turn takes.
        server_bytes: The server's memory when all workers had been served.
        bytes_per_worker: What of it was not there before the first worker came, divided by W.
        slowest_share: Turns per second of the slowest worker, in those of an average one.
    """

    rate: float
    turns: int
    server_cpu: float
    worker_cpu: float
    p50: float
    p99: float
    server_bytes: int
    bytes_per_worker: float
    slowest_share: float


@dataclass(frozen=True)
class Count:
    """What one worker counted: seconds of each of its turns, one after another."""

    times: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def rate(self) -> float:
        return float(len(self.times) / self.times.sum())


class Signals:
    """What the harness and the workers tell each other without disturbing the measurement."""

    def __init__(self, workers: int) -> None:
        self.news = PROCESSES.Queue()
        self.go = PROCESSES.Event()
        self.stop = PROCESSES.RawValue("b", 0)
        self.turns = PROCESSES.RawArray("Q", workers)  # turns made so far, a place for each worker


def measure(contender: Contender, parameters: int, workers: int, seconds: float, log: Path) -> Figures:
    """Measures one contender with fresh processes, all of which have ended when this returns.

    Each worker counts whole turns from the moment when all are ready until `seconds` later, and goes on taking turns
    until every worker has counted, so that each turn counted meets the full load.

    Raises:
        ContenderFailedError: The server or a worker ended, or nothing was heard of them for too long.
    """
    place = Place(free_port(), parameters, workers, log)
    with contender.server(place) as roots:
        empty = machine.memory_bytes(machine.tree(roots))
        signals = Signals(contender.processes(workers))
        with _workers(contender, place, seconds, signals) as started:
            _await(signals, started)
            servers, clients = machine.tree(roots), [process.pid for process in started]
            before = _used(servers, clients, signals)
            signals.go.set()
            counts: list[Count] = _await(signals, started)
            used = [after - earlier for after, earlier in zip(_used(servers, clients, signals), before, strict=True)]
            full = machine.memory_bytes(servers)
            signals.stop.value = 1
    times = np.concatenate([count.times for count in counts])
    rates = [count.rate for count in counts]
    p50, p99 = np.percentile(times, [50, 99])
    return Figures(
        rate=sum(rates), turns=len(times), server_cpu=used[0] / used[2], worker_cpu=used[1] / used[2], p50=float(p50),
        p99=float(p99), server_bytes=full, bytes_per_worker=(full - empty) / workers,
        slowest_share=min(rates) / (sum(rates) / len(rates)),
    )  # fmt: skip


@contextmanager
def _workers(contender: Contender, place: Place, seconds: float, signals: Signals) -> Iterator[list[Any]]:
    """Worker processes; at the end they have a moment to leave."""
    started: list[Any] = []
    try:
        for index in range(len(signals.turns)):
            started.append(PROCESSES.Process(target=_work, args=(contender, place, index, seconds, signals)))
            started[-1].start()
        yield started
    finally:
        deadline = time.monotonic() + 1
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _await(signals: Signals, started: list[Any]) -> list[Any]:
    """One piece of news from each worker."""
    gathered: list[Any] = []
    heard = time.monotonic()
    while len(gathered) < len(started):
        try:
            news = signals.news.get(timeout=1)
        except Empty:
            dead = [process for process in started if not process.is_alive()]
            if dead:
                raise ContenderFailedError(f"a worker ended with status {dead[0].exitcode}") from None
            if time.monotonic() > heard + PATIENCE:
                raise ContenderFailedError(f"nothing was heard of its workers for {PATIENCE:g} s") from None
            continue
        if isinstance(news, str):
            raise ContenderFailedError(news)
        gathered.append(news)
        heard = time.monotonic()
    return gathered


def _used(servers: list[int], clients: list[int], signals: Signals) -> tuple[float, float, int]:
    """Processor seconds of the server and of the workers so far, and turns made."""
    return machine.cpu_seconds(servers), machine.cpu_seconds(clients), sum(signals.turns)


def _work(contender: Contender, place: Place, index: int, seconds: float, signals: Signals) -> None:
    place.redirect()
    try:
        with contender.worker(place, index) as turn:
            for _ in range(WARM_UP):
                _require_theta(turn(), place)
            signals.news.put(None)
            signals.go.wait()
            signals.news.put(_count(turn, index, seconds, signals))
            while not signals.stop.value:
                turn()
                signals.turns[index] += 1
    except Exception as error:
        signals.news.put(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise


def _count(turn: RoundTrip, index: int, seconds: float, signals: Signals) -> Count:
    times: list[float] = []
    ended = began = time.perf_counter()
    while ended < began + seconds or len(times) < MIN_TURNS:
        last = ended
        turn()
        ended = time.perf_counter()
        times.append(ended - last)
        signals.turns[index] += 1
    return Count(np.array(times))


def _require_theta(theta: Any, place: Place) -> None:
    """Raises ContenderFailedError unless θ is what every contender must give back; a list stands for frames of an echo."""
    if isinstance(theta, list):
        return
    array = np.asarray(theta)
    if (
        array.shape != (place.parameters,)
        or array.dtype != np.float32
        or not np.isfinite(array[:: 1 + array.size // 1000]).all()
    ):
        raise ContenderFailedError(f"it gave back no θ of {place.parameters} finite float32")
