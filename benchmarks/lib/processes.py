"""Client processes for the benchmarks: each holds many sessions, one thread a session, and commits as fast as it can."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
from gem_api.process.options import as_environment
from gem_client import Admin, Retry, connect
from gem_worker.launcher.cluster import free_port

from benchmarks.lib import machine

CLIENT_PROCESSES = 4


@dataclass(frozen=True)
class Load:
    """The result of one measurement: commits of each session, and seconds of each commit. If the servers' processes are known,
    also the seconds of processor time of each, and its resident bytes while all sessions were connected."""

    commits: list[int]
    latencies: np.ndarray[Any, np.dtype[np.float64]]
    seconds: float
    each_cpu: tuple[float, ...]
    each_bytes: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Commits per second, all sessions together."""
        return sum(self.commits) / self.seconds

    @property
    def jain(self) -> float:
        """Jain's fairness index of the commits per session: 1 for equal shares, 1/n for all to one (Jain et al. 1984)."""
        shares = np.array(self.commits, float)
        return float(shares.sum() ** 2 / (len(shares) * (shares**2).sum()))

    @property
    def p50(self) -> float:
        """Median of the seconds of a commit."""
        return float(np.percentile(self.latencies, 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.latencies, 99))

    @property
    def server_cpu(self) -> float:
        """Seconds of processor time of the busiest server for a commit."""
        return max(self.each_cpu) / sum(self.commits)

    @property
    def server_bytes(self) -> int:
        """Resident bytes of the largest server."""
        return max(self.each_bytes)

    def figures(self) -> dict[str, float]:
        """The figures to keep."""
        return {name: getattr(self, name) for name in ("rate", "jain", "p50", "p99", "server_cpu", "server_bytes")}


@contextmanager
def server(
    rule: str = "gem", port: int | None = None, *options: str, host: str = "127.0.0.1", tls_ca: Path | None = None,
    **settings: Any,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Runs a server process with the given options, on a free port if none is given. Yields its address and process id.

    Args:
        host: The address of this machine that it listens on.
        tls_ca: The authority of its certificate, if the options give it one.
        settings: Settings that have no option.
    """
    address = f"{host}:{port or free_port()}"
    command = [sys.executable, "-m", "gem_server", f"--listen={address}", "--metrics-listen=", f"--rule={rule}", *options]
    environment = os.environ | as_environment({"lane_listen": f"{host}:0", "memory_limit": 0} | settings)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        with Admin(address, tls_ca=tls_ca) as admin:
            Retry(give_up_after=60).call(admin.status)
        yield address, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(
    address: str, parameters: int, sessions: int, seconds: float, shared_memory: bool = True, *server_pids: int | None,
    enter: Callable[[], None] | None = None, **connecting: Any,
) -> Load:  # fmt: skip
    """Commits from `sessions` sessions at once. Measures for a time that begins when all have made their first commit.

    Args:
        enter: Called first in each client process, to move it elsewhere.
        connecting: More arguments of `gem_client.connect`.
    """
    context = mp.get_context("spawn")
    counts = split_evenly(sessions)
    results: Queue[tuple[list[int], list[float]]] = context.Queue()
    ready, leave = context.Barrier(len(counts) + 1), context.Event()
    clients = [
        context.Process(
            target=_client,
            args=(address, parameters, count, seconds, ready, leave, results, enter),
            kwargs={"shared_memory": shared_memory, **connecting},
        )
        for count in counts
    ]
    for client in clients:
        client.start()
    ready.wait()
    servers = [pid for pid in server_pids if pid]
    began = [machine.cpu_seconds([pid]) for pid in servers]
    gathered = [results.get() for _ in clients]
    used = tuple(machine.cpu_seconds([pid]) - before for pid, before in zip(servers, began, strict=True))
    held = tuple(map(resident_bytes, servers))
    leave.set()
    for client in clients:
        client.join()
    commits = [count for process_commits, _ in gathered for count in process_commits]
    return Load(commits, np.concatenate([times for _, times in gathered]), seconds, used, held)


def split_evenly(count: int, processes: int = CLIENT_PROCESSES) -> list[int]:
    """Distributes sessions, or workers, over processes as evenly as possible. Every process gets at least one."""
    processes = min(count, processes)
    return [count // processes + (number < count % processes) for number in range(processes)]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def _client(
    address: str, parameters: int, sessions: int, seconds: float, ready: Any, leave: Any, results: Any,
    enter: Callable[[], None] | None, **connecting: Any,
) -> None:  # fmt: skip
    if enter is not None:
        enter()
    commits, latencies = [0] * sessions, [[] for _ in range(sessions)]  # type: tuple[list[int], list[list[float]]]
    together, go = threading.Barrier(sessions + 1), threading.Event()

    def work(index: int) -> None:
        gradient = np.full(parameters, 1e-3, np.float32)
        with connect(address, **connecting) as session:
            session.join({"theta": np.zeros(parameters, np.float32)})
            session.commit(gradient)
            together.wait()
            go.wait()
            end = time.monotonic() + seconds
            while (began := time.monotonic()) < end:
                session.commit(gradient)
                latencies[index].append(time.monotonic() - began)
                commits[index] += 1
            together.wait()
            leave.wait()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(sessions)]
    for thread in threads:
        thread.start()
    together.wait()
    ready.wait()
    go.set()
    together.wait()
    results.put((commits, [latency for each in latencies for latency in each]))
    for thread in threads:
        thread.join()
