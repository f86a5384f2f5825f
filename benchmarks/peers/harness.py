"""One measurement: a server, and W worker processes that all make round trips as fast as they can for some seconds."""

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

from benchmarks.lib import machine
from benchmarks.peers.contenders.base import PROCESSES, Contender, ContenderFailedError, Place, RoundTrip

WARM_UP = 3  # round trips of each worker before anything is counted
MIN_ROUND_TRIPS = 3  # minimum for each worker while it is measured, even if they take longer than the measurement
PATIENCE = 300.0  # seconds without a message from any worker after which the measurement fails


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        rate: Round trips per second, all workers together.
        server_cpu, worker_cpu: Seconds of processor time for each round trip, in the server and in the worker.
        p50, p99: Quantiles of the seconds that a round trip takes.
    """

    rate: float
    server_cpu: float
    worker_cpu: float
    p50: float
    p99: float


class Signals:
    """Communication between the harness and the workers that does not disturb the measurement."""

    def __init__(self, workers: int) -> None:
        self.news = PROCESSES.Queue()
        self.go = PROCESSES.Event()
        self.stop = PROCESSES.RawValue("b", 0)
        self.round_trips = PROCESSES.RawArray("Q", workers)  # round trips so far, one element for each worker


def measure(contender: Contender, parameters: int, workers: int, seconds: float, log: Path) -> Figures:
    """Measures one contender with fresh processes, all of which have ended when this returns.

    Once all workers are ready, each counts complete round trips for `seconds`. It continues to make round trips until every
    worker has counted, so that each counted round trip meets the full load.

    Raises:
        ContenderFailedError: The server or a worker ended, or they sent no message for too long.
    """
    place = Place(free_port(), parameters, workers, log)
    with contender.server(place) as roots:
        signals = Signals(contender.processes(workers))
        with _workers(contender, place, seconds, signals) as started:
            _await(signals, started)
            servers, clients = machine.tree(roots), [process.pid for process in started]
            before = _used(servers, clients, signals)
            signals.go.set()
            counts: list[list[float]] = _await(signals, started)
            used = [after - earlier for after, earlier in zip(_used(servers, clients, signals), before, strict=True)]
            signals.stop.value = 1
    times = np.concatenate(counts)
    rate = sum(len(each) / sum(each) for each in counts)
    return Figures(rate, used[0] / used[2], used[1] / used[2], *map(float, np.percentile(times, [50, 99])))


@contextmanager
def _workers(contender: Contender, place: Place, seconds: float, signals: Signals) -> Iterator[list[Any]]:
    """Starts the worker processes. At the end they have a second to exit."""
    started: list[Any] = []
    try:
        for index in range(len(signals.round_trips)):
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
    """Waits for one message from each worker, and returns them."""
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
                raise ContenderFailedError(f"its workers sent no message for {PATIENCE:g} s") from None
            continue
        if isinstance(news, str):
            raise ContenderFailedError(news)
        gathered.append(news)
        heard = time.monotonic()
    return gathered


def _used(servers: list[int], clients: list[int], signals: Signals) -> tuple[float, float, int]:
    """Processor seconds of the server and of the workers so far, and the number of round trips."""
    return machine.cpu_seconds(servers), machine.cpu_seconds(clients), sum(signals.round_trips)


def _work(contender: Contender, place: Place, index: int, seconds: float, signals: Signals) -> None:
    place.redirect()
    try:
        with contender.worker(place, index) as round_trip:
            for _ in range(WARM_UP):
                _require_theta(round_trip(), place)
            signals.news.put(None)
            signals.go.wait()
            signals.news.put(_count(round_trip, index, seconds, signals))
            while not signals.stop.value:
                round_trip()
                signals.round_trips[index] += 1
    except Exception as error:
        signals.news.put(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise


def _count(round_trip: RoundTrip, index: int, seconds: float, signals: Signals) -> list[float]:
    """The seconds of each round trip, in order."""
    times: list[float] = []
    ended = began = time.perf_counter()
    while ended < began + seconds or len(times) < MIN_ROUND_TRIPS:
        last = ended
        round_trip()
        ended = time.perf_counter()
        times.append(ended - last)
        signals.round_trips[index] += 1
    return times


def _require_theta(theta: Any, place: Place) -> None:
    """Raises ContenderFailedError unless θ has the shape and values that every contender must return. A list (the frames of a
    bare echo) is accepted as it is."""
    if isinstance(theta, list):
        return
    array = np.asarray(theta)
    if (
        array.shape != (place.parameters,)
        or array.dtype != np.float32
        or not np.isfinite(array[:: 1 + array.size // 1000]).all()
    ):
        raise ContenderFailedError(f"it did not return a θ of {place.parameters} finite float32 values")
