"""A server under load: worker processes that all make round trips as fast as they can for some seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np

from benchmarks.lib import machine

MIN_ROUND_TRIPS = 3  # minimum for each worker while it is measured, even if they take longer than the measurement
PATIENCE = 300.0  # seconds without a message from any worker after which the measurement fails
_LEAVING_SECONDS = 10.0
# Processes are forked from one that runs no threads, and may have imported large packages.
PROCESSES = get_context("forkserver")

RoundTrip = Callable[[], Any]
# Connects the worker with this number, from 0, and yields what makes a round trip. Other processes must be able to unpickle it.
Worker = Callable[[int], AbstractContextManager[RoundTrip]]


class LoadFailed(Exception):
    """Nothing could be measured; the message says why."""


@dataclass(frozen=True)
class Load:
    """The result of one measurement.

    Attributes:
        times: The seconds of each round trip of each worker.
        each_cpu: Seconds of processor time of each server for each round trip, its child processes included.
        each_bytes: Resident bytes of each server while all workers were connected.
        worker_cpu: Seconds of processor time of the workers for each round trip.
    """

    times: list[list[float]]
    each_cpu: tuple[float, ...]
    each_bytes: tuple[int, ...]
    worker_cpu: float

    @property
    def rate(self) -> float:
        """Round trips per second, all workers together."""
        return sum(len(each) / sum(each) for each in self.times)

    @property
    def jain(self) -> float:
        """Jain's fairness index of the workers' rates: 1 for equal shares, 1/n for all to one (Jain et al. 1984)."""
        shares = np.array([len(each) / sum(each) for each in self.times])
        return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum()))

    @property
    def p50(self) -> float:
        """Median of the seconds of a round trip."""
        return float(np.percentile(np.concatenate(self.times), 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(np.concatenate(self.times), 99))

    @property
    def server_cpu(self) -> float:
        """Seconds of processor time of the busiest server for a round trip."""
        return max(self.each_cpu, default=0.0)

    @property
    def server_bytes(self) -> int:
        """Resident bytes of the largest server."""
        return max(self.each_bytes)

    def figures(self) -> dict[str, float]:
        """The figures to keep."""
        return {name: getattr(self, name) for name in ("rate", "jain", "p50", "p99", "server_cpu", "server_bytes")}


class Signals:
    """Communication with the workers that does not disturb the measurement."""

    def __init__(self, workers: int) -> None:
        self.news = PROCESSES.Queue()
        self.go = PROCESSES.Event()
        self.stop = PROCESSES.RawValue("b", 0)
        self.round_trips = PROCESSES.RawArray("Q", workers)  # round trips so far, one element for each worker


def measure(
    worker: Worker, counts: Sequence[int], seconds: float, servers: Sequence[int], enter: Callable[[], None] | None = None
) -> Load:
    """Measures with fresh worker processes, all of which have ended when this returns.

    Once all workers are ready, each counts complete round trips for `seconds`. It continues to make round trips until every
    worker has counted, so that each counted round trip meets the full load.

    Args:
        worker: The workers.
        counts: How many of them each process has, each in a thread of its own.
        servers: The ids of the servers' processes.
        enter: Called first in each worker process.

    Raises:
        LoadFailed: A worker ended, or they sent no message for too long.
    """
    signals = Signals(sum(counts))
    with _started(worker, counts, seconds, signals, enter) as started:
        _await(signals, started)
        trees = [machine.tree([server]) for server in servers]
        watched = [*trees, [process.pid for process in started]]
        before, begun = [machine.cpu_seconds(pids) for pids in watched], sum(signals.round_trips)
        signals.go.set()
        times: list[list[float]] = _await(signals, started)
        made = sum(signals.round_trips) - begun
        cpu = [(machine.cpu_seconds(pids) - earlier) / made for pids, earlier in zip(watched, before, strict=True)]
        held = tuple(map(resident_bytes, servers))
        signals.stop.value = 1
    return Load(times, tuple(cpu[:-1]), held, cpu[-1])


def split_evenly(count: int, processes: int = 4) -> list[int]:
    """Distributes workers over processes as evenly as possible. Every process gets at least one."""
    processes = min(count, processes)
    return [count // processes + (number < count % processes) for number in range(processes)]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


@contextmanager
def _started(
    worker: Worker, counts: Sequence[int], seconds: float, signals: Signals, enter: Callable[[], None] | None
) -> Iterator[list[Any]]:
    """Starts the worker processes. At the end they have some seconds to exit."""
    started: list[Any] = []
    try:
        for place in range(len(counts)):
            numbers = range(sum(counts[:place]), sum(counts[: place + 1]))
            process = PROCESSES.Process(target=_work_all, args=(worker, numbers, seconds, signals, enter))
            process.start()
            started.append(process)
        yield started
    finally:
        deadline = time.monotonic() + _LEAVING_SECONDS
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()) if signals.stop.value else 0)
            process.kill()
            process.join()


def _await(signals: Signals, started: list[Any]) -> list[Any]:
    """Waits for one message from each worker, and returns them."""
    gathered: list[Any] = []
    heard = time.monotonic()
    while len(gathered) < len(signals.round_trips):
        try:
            news = signals.news.get(timeout=1)
        except Empty:
            dead = [process for process in started if not process.is_alive()]
            if dead:
                raise LoadFailed(f"a worker ended with status {dead[0].exitcode}") from None
            if time.monotonic() > heard + PATIENCE:
                raise LoadFailed(f"its workers sent no message for {PATIENCE:g} s") from None
            continue
        if isinstance(news, str):
            raise LoadFailed(news)
        gathered.append(news)
        heard = time.monotonic()
    return gathered


def _work_all(worker: Worker, numbers: range, seconds: float, signals: Signals, enter: Callable[[], None] | None) -> None:
    if enter is not None:
        enter()
    others = [threading.Thread(target=_work, args=(worker, number, seconds, signals)) for number in numbers[1:]]
    for thread in others:
        thread.start()
    _work(worker, numbers[0], seconds, signals)
    for thread in others:
        thread.join()


def _work(worker: Worker, number: int, seconds: float, signals: Signals) -> None:
    try:
        with worker(number) as round_trip:
            signals.news.put(None)
            signals.go.wait()
            signals.news.put(_count(round_trip, number, seconds, signals))
            while not signals.stop.value:
                round_trip()
                signals.round_trips[number] += 1
    except Exception as error:
        signals.news.put(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise


def _count(round_trip: RoundTrip, number: int, seconds: float, signals: Signals) -> list[float]:
    """The seconds of each round trip, in order."""
    times: list[float] = []
    ended = began = time.perf_counter()
    while ended < began + seconds or len(times) < MIN_ROUND_TRIPS:
        last = ended
        round_trip()
        ended = time.perf_counter()
        times.append(ended - last)
        signals.round_trips[number] += 1
    return times
