"""Kills servers and workers with -9 and cuts connections, then has a checker look for lost commits.

Several servers hold a range of θ each. They are killed alone and together, workers at any moment, and also when a commit of
theirs is in one range only."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from chaos.checker import check
from chaos.cluster import Cluster
from chaos.report import KINDS, Report
from chaos.server_checker import lines_of
from chaos.worker import Kind

_TOGETHER = 0.1  # how often the other servers are killed at the same moment
_WITH_WORKER = 0.3  # how often a worker is killed while a server is down
_HALF_SECONDS = 5.0  # in which a worker's commit usually gets to the servers that are left


def attack(
    folder: Path,
    *,
    servers: int,
    seed: int,
    server_kills: int,
    worker_kills: int,
    suspensions: int = 0,
    parameters: int,
    bytes_between_faults: int,
    kinds: list[Kind] = KINDS,
    optimizer: str = "sgd",
    in_step: bool = False,
    progress: Callable[[str], object] = lambda line: None,
) -> Report:
    """Kills each server and workers so many times, at moments drawn from the seed, and checks the result.

    Args:
        folder: A new one.
        servers: How many there are.
        seed: What everything is drawn from.
        server_kills: How often each server is killed; suspensions may add to that.
        worker_kills: How often workers are killed.
        suspensions: How often a worker is suspended, while one of several servers is down, until its lease on the others ends.
        parameters: Size of the model.
        bytes_between_faults: Of a connection, on average.
        kinds: The workers.
        optimizer: The one that the servers keep: "sgd", or "adamw", with which workers are sent a point ahead of θ.
        in_step: Whether replies wait for other workers' commits, and slow workers get smaller batches.
        progress: Is told how far the run is.
    """
    report, began = Report(seed, parameters, len(kinds), [0] * servers), time.monotonic()
    cluster = Cluster(
        folder, seed, parameters, kinds, servers=servers, optimizer=optimizer, in_step=in_step,
        bytes_between_faults=bytes_between_faults,
    )  # fmt: skip
    faults = _Attack(cluster, report, random.Random(seed), server_kills, worker_kills)
    try:
        cluster.wait_all_acknowledged()
        for number in faults.rounds(suspensions):
            if number % 10 == 0:
                progress(
                    f"{time.monotonic() - began:.0f} s: servers killed {report.kills_by_range} times, workers "
                    f"{report.worker_kills} times, {cluster.diaries.count()} commits acknowledged"
                )
        cluster.wait_acknowledged(50)
        cluster.wait_shard_completed()
        versions = cluster.finish()
    finally:
        cluster.close()
    report.count_connections(cluster)
    report.verdict = check([server.checkpoints for server in cluster.servers], cluster.diaries.paths(), versions)
    report.seconds = time.monotonic() - began
    return report


class _Attack:
    """Causes the faults of one run: each server is killed `server_kills` times, workers `worker_kills` times."""

    def __init__(self, cluster: Cluster, report: Report, chance: random.Random, server_kills: int, worker_kills: int) -> None:
        self._cluster = cluster
        self._report = report
        self._chance = chance
        self._server_kills = server_kills
        self._worker_kills = worker_kills

    def rounds(self, suspensions: int) -> Iterator[int]:
        """Causes one fault after the other. Yields how many there were, after each."""
        faults: list[Callable[[], None]] = [self._kill_worker] * self._worker_kills
        faults += [partial(self._kill_server, index) for index in range(len(self._cluster.servers))] * self._server_kills
        faults += [partial(self._suspend, number % len(self._cluster.servers)) for number in range(suspensions)]
        self._chance.shuffle(faults)
        for number, fault in enumerate(faults, 1):
            fault()
            self._cluster.wait_acknowledged(self._chance.choice((0, 1, 5, 30)))
            yield number

    def _kill_worker(self) -> None:
        if self._workers_due:
            self._report.kill_worker(self._cluster, self._chance)

    def _kill_server(self, index: int) -> None:
        """Kills a server, and sometimes the others at the same moment, and a worker while it is down."""
        if not self._due(index):
            return
        others = [other for other in range(len(self._cluster.servers)) if other != index and self._due(other)]
        killed = [index, *(others if self._chance.random() < _TOGETHER else ())]
        self._kill(killed)
        if len(self._cluster.servers) > 1 and self._workers_due and self._chance.random() < _WITH_WORKER:
            which, half = self._wait_half()
            self._report.kill_worker(self._cluster, self._chance, which)
            self._report.worker_kills_in_between += half
        self._restart(killed)

    def _suspend(self, index: int) -> None:
        """Suspends a worker while a server is down, until the others have ended its lease, which the server then still has."""
        down = self._cluster.servers[index]
        self._kill([index])
        which, _ = self._wait_half()
        with self._cluster.suspended(which) as worker:
            self._cluster.wait_expired(worker, [server for server in self._cluster.servers if server is not down])
            self._report.leases_expired += 1
            self._restart([index])

    def _kill(self, killed: list[int]) -> None:
        for index in killed:
            self._cluster.servers[index].process.kill()  # all of them before the first is waited for
        for index in killed:
            self._cluster.servers[index].kill()
            self._report.kills_by_range[index] += 1
            self._report.server_kills += 1

    def _restart(self, killed: list[int]) -> None:
        servers = [self._cluster.servers[index] for index in killed]
        for server in servers:
            self._report.restart(server, self._chance)
        self._report.wait_for_service(self._cluster, servers)

    @property
    def _workers_due(self) -> bool:
        return self._report.worker_kills < self._worker_kills

    def _due(self, index: int) -> bool:
        return self._report.kills_by_range[index] < self._server_kills

    def _wait_half(self) -> tuple[int, bool]:
        """Waits for a worker whose last commit some servers have acknowledged, and others not. If there is none in time, takes
        any. Returns its number, and whether it is such a one."""
        workers, end, pause = self._cluster.workers, time.monotonic() + _HALF_SECONDS, threading.Event()
        while time.monotonic() < end:
            if half := [
                which for which, worker in enumerate(workers) if _half_acknowledged(worker.diary, len(self._cluster.servers))
            ]:
                return self._chance.choice(half), True
            pause.wait(0.01)
        return self._chance.randrange(len(workers)), False


def _half_acknowledged(diary: Path, servers: int) -> bool:
    """Whether some servers have acknowledged the last commit that a worker sent, and others not."""
    if not diary.exists():
        return False
    acknowledged = servers
    for line in lines_of(diary):
        if line["event"] == "sending":
            acknowledged = 0
        acknowledged += line["event"] == "ack"
    return 0 < acknowledged < servers
