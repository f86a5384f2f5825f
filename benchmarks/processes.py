"""Client processes for the benchmarks: each holds many sessions, one thread a session, and commits as fast as it can."""

from __future__ import annotations

import multiprocessing as mp
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
from gem_client import Admin, Retry, connect
from gem_worker.cluster import free_port

CLIENT_PROCESSES = 4


@dataclass(frozen=True)
class Load:
    """What the sessions of one measurement did: commits of each session, seconds of each commit."""

    commits: list[int]
    latencies: np.ndarray[Any, np.dtype[np.float64]]
    seconds: float

    @property
    def rate(self) -> float:
        """Commits per second, all sessions together."""
        return sum(self.commits) / self.seconds

    @property
    def jain(self) -> float:
        """Jain's fairness index of the commits per session: 1 for equal shares, 1/n for all to one (Jain et al. 1984)."""
        shares = np.array(self.commits, float)
        return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum()))


@contextmanager
def server(rule: str = "gem") -> Iterator[tuple[str, int]]:
    """A server process; yields its address and process id."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "gem_server",
        f"--listen={address}",
        "--metrics-listen=",
        f"--rule={rule}",
        "--memory-limit=0",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with Admin(address) as admin:
            Retry(give_up_after=60).call(admin.status)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def measure(address: str, parameters: int, sessions: int, seconds: float) -> Load:
    """Commits from `sessions` sessions at once, for a while after all of them have made their first commit."""
    context = mp.get_context("spawn")
    counts = [sessions // CLIENT_PROCESSES + (i < sessions % CLIENT_PROCESSES) for i in range(CLIENT_PROCESSES)]
    counts = [count for count in counts if count]
    results: Queue[tuple[list[int], list[float]]] = context.Queue()
    ready = context.Barrier(len(counts) + 1)
    clients = [context.Process(target=_client, args=(address, parameters, count, seconds, ready, results)) for count in counts]
    for client in clients:
        client.start()
    ready.wait()
    gathered = [results.get() for _ in clients]
    for client in clients:
        client.join()
    commits = [count for process_commits, _ in gathered for count in process_commits]
    return Load(commits, np.concatenate([times for _, times in gathered]), seconds)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def _client(address: str, parameters: int, sessions: int, seconds: float, ready: Any, results: Any) -> None:
    commits, latencies = [0] * sessions, [[] for _ in range(sessions)]  # type: tuple[list[int], list[list[float]]]
    joined, go = threading.Barrier(sessions + 1), threading.Event()

    def work(index: int) -> None:
        gradient = np.full(parameters, 1e-3, np.float32)
        with connect(address) as session:
            session.join({"theta": np.zeros(parameters, np.float32)})
            session.commit(gradient)
            joined.wait()
            go.wait()
            end = time.monotonic() + seconds
            while (began := time.monotonic()) < end:
                session.commit(gradient)
                latencies[index].append(time.monotonic() - began)
                commits[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(sessions)]
    for thread in threads:
        thread.start()
    joined.wait()
    ready.wait()
    go.set()
    for thread in threads:
        thread.join()
    results.put((commits, [latency for each in latencies for latency in each]))
