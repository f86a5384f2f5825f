"""Kills servers and workers with -9 and cuts connections, then has a checker look for lost commits.

Several servers hold a range of θ each. They are killed alone and together, workers at any moment, and also when a commit of
theirs is in one range only."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chaos.checker import Fate, Verdict, check
from chaos.cluster import Cluster
from chaos.faults import KINDS, Faults
from chaos.server_checker import lines_of
from chaos.worker import Kind

_TOGETHER = 0.1  # how often the other servers are killed at the same moment
_WITH_WORKER = 0.3  # how often a worker is killed while a server is down
_HALF_SECONDS = 5.0  # in which a worker's commit usually gets to the servers that are left


@dataclass
class Report(Faults):
    """The faults that a cluster had, and the results.

    Attributes:
        kills_by_range: How often each server was killed; not those while it started.
        worker_kills_in_between: Workers killed while a commit of theirs was acknowledged by one server, and another was down.
        leases_expired: Workers suspended until their leases ended.
    """

    kills_by_range: list[int] = field(default_factory=list)
    worker_kills_in_between: int = 0
    leases_expired: int = 0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def good(self) -> bool:
        return self.verdict.good

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), **self.verdict.as_dict()}

    def text(self) -> str:
        verdict, ranges = self.verdict, self.verdict.ranges
        torn = ", ".join(f"{verdict.torn.get(fate, 0)} where {fate}" for fate in Fate if fate is not Fate.LEFT)
        wrong = sum(each.thetas_wrong for each in ranges), sum(each.checkpoints_wrong for each in ranges)
        lines = {
            **self.lines(),
            "killed with -9, by range": " · ".join(map(str, self.kills_by_range)),
            "workers killed in between": f"{self.worker_kills_in_between}; {self.leases_expired} suspended until a lease ended",
            "commits": f"{verdict.committed} acknowledged, {verdict.whole} in all ranges",
            "applied, by range": " · ".join(str(each.applied) for each in ranges),
            "tried more than once, by range": " · ".join(str(each.resent) for each in ranges),
            "lost, by range": " · ".join(str(each.lost) for each in ranges),
            "doubled, by range": " · ".join(str(each.doubled) for each in ranges),
            "not as sent, by range": " · ".join(str(each.strange) for each in ranges),
            "torn commits, by range": f"{' · '.join(map(str, verdict.torn_by_range))}: {torn}",
            "versions at rest": " · ".join(map(str, verdict.versions_at_rest)),
            "shards completed": verdict.shards_completed,
            "θ seen": f"{sum(each.thetas_seen for each in ranges)} times, {wrong[0]} wrong",
            "checkpoints": f"{sum(each.checkpoints for each in ranges)}, {wrong[1]} not equal to the replay",
            "final θ, by range": " · ".join("equal to the bit" if each.theta_equal else "NOT the replay's" for each in ranges),
        }
        return "\n".join([f"{name:32}{value}" for name, value in lines.items()] + verdict.all_problems())


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
        progress: Is told how far the run is.
    """
    report, began = Report(seed, parameters, len(kinds), kills_by_range=[0] * servers), time.monotonic()
    cluster = Cluster(folder, seed, parameters, kinds, servers=servers, bytes_between_faults=bytes_between_faults)
    faults = _Attack(cluster, report, random.Random(seed), server_kills, worker_kills)
    try:
        cluster.wait_acknowledged(10)
        for number in faults.rounds(suspensions):
            if number % 10 == 0:
                progress(
                    f"{time.monotonic() - began:.0f} s: servers killed {report.kills_by_range} times, workers "
                    f"{report.worker_kills} times, {cluster.diaries.count()} commits acknowledged"
                )
        cluster.wait_acknowledged(50)
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
