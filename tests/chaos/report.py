"""The faults that a chaos run causes in a cluster, how many there were, and what came of them."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from chaos.checker import Fate, Verdict
from chaos.cluster import Cluster
from chaos.server_process import ServerProcess
from chaos.worker import Kind

KINDS = [
    Kind(shared_memory=True, proxied=False),
    Kind(shared_memory=True, overlap=True),
    Kind(shards=True),
    Kind(overlap=True),
    Kind(lane=False, gradient_dtype="bfloat16", theta_dtype="bfloat16"),
    Kind(gradient_dtype="int8"),
]
# Of unequal speed: with batches in proportion, they are in step.
PACED = [replace(kind, step_seconds=seconds) for kind, seconds in zip(KINDS, (0.1, 0.1, 0.1, 0.2, 0.1, 0.4), strict=True)]
# A server may die at any moment of its start, too: once it has printed one of these, or nothing yet.
_MOMENTS = ("", "resumed", "checkpoint written", "serving")


@dataclass
class Report:
    """The faults that a cluster had, and the results.

    Attributes:
        server_kills: How often servers were killed; not those while they started.
        kills_by_range: Alike, of each server.
        worker_kills_in_between: Workers killed while a commit of theirs was acknowledged by one server, and another was down.
        leases_expired: Workers suspended until their leases ended.
    """

    seed: int
    parameters: int
    workers: int
    kills_by_range: list[int]
    server_kills: int = 0
    server_kills_while_starting: int = 0
    worker_kills: int = 0
    worker_kills_in_between: int = 0
    leases_expired: int = 0
    connections: dict[str, int] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    serving_seconds: list[float] = field(default_factory=list)
    first_acknowledgement_seconds: list[float] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def good(self) -> bool:
        return self.verdict.good

    def as_dict(self) -> dict[str, Any]:
        faults = {name: value for name, value in vars(self).items() if name != "verdict"}
        return {**faults, **self.verdict.as_dict()}

    def text(self) -> str:
        verdict, ranges = self.verdict, self.verdict.ranges
        torn = ", ".join(f"{verdict.torn.get(fate, 0)} where {fate}" for fate in Fate if fate is not Fate.LEFT)
        wrong = sum(each.thetas_wrong for each in ranges), sum(each.checkpoints_wrong for each in ranges)
        lines = {
            "model": f"{self.parameters} parameters, {self.workers} workers, seed {self.seed}, {self.seconds:.0f} s",
            "killed with -9": f"server {self.server_kills} times, {self.server_kills_while_starting} more while it started; "
            f"workers {self.worker_kills} times",
            "killed with -9, by range": _by_range(self.kills_by_range),
            "workers killed in between": f"{self.worker_kills_in_between}; {self.leases_expired} suspended until a lease ended",
            "connections": ", ".join(f"{count} {kind}" for kind, count in sorted(self.connections.items())),
            "commits by transport": ", ".join(f"{count} {via}" for via, count in self.transports.items()),
            "start to serving": _spread(self.serving_seconds),
            "start to first acknowledgement": _spread(self.first_acknowledgement_seconds),
            "commits": f"{verdict.committed} acknowledged, {verdict.whole} in all ranges",
            "applied, by range": _by_range(each.applied for each in ranges),
            "tried more than once, by range": _by_range(each.resent for each in ranges),
            "of smaller batches, by range": _by_range(each.smaller for each in ranges),
            "replies held, by range": _by_range(each.released for each in ranges),
            "lost, by range": _by_range(each.lost for each in ranges),
            "doubled, by range": _by_range(each.doubled for each in ranges),
            "not as sent, by range": _by_range(each.strange for each in ranges),
            "torn commits, by range": f"{_by_range(verdict.torn_by_range)}: {torn}",
            "versions at rest": _by_range(verdict.versions_at_rest),
            "shards completed": verdict.shards_completed,
            "θ seen": f"{sum(each.thetas_seen for each in ranges)} times, {wrong[0]} wrong",
            "checkpoints": f"{sum(each.checkpoints for each in ranges)}, {wrong[1]} not equal to the replay",
            "final θ, by range": _by_range("equal to the bit" if each.theta_equal else "NOT the replay's" for each in ranges),
        }
        return "\n".join([f"{name:32}{value}" for name, value in lines.items()] + verdict.all_problems())

    def kill_worker(self, cluster: Cluster, chance: random.Random, which: int | None = None) -> None:
        """Kills a worker, any by default. Another comes in its place, under the same name or a new one."""
        which = chance.randrange(len(cluster.workers)) if which is None else which
        cluster.kill_worker(which, renamed=chance.random() < 0.5)
        self.worker_kills += 1

    def restart(self, server: ServerProcess, chance: random.Random) -> None:
        """Starts a server that was killed. Sometimes it is killed again before it serves, and started once more."""
        server.start()
        if chance.random() < 0.2:
            server.wait(chance.choice(_MOMENTS))
            server.kill()
            self.server_kills_while_starting += 1
            server.start()

    def wait_for_service(self, cluster: Cluster, servers: list[ServerProcess]) -> None:
        """Waits until servers that were started serve, and workers' commits are acknowledged again."""
        began = time.monotonic()
        for server in servers:
            server.wait("serving")
        self.serving_seconds.append(time.monotonic() - began)
        cluster.wait_acknowledged(1)
        self.first_acknowledgement_seconds.append(time.monotonic() - began)

    def count_connections(self, cluster: Cluster) -> None:
        self.connections = dict(sum((server.faults for server in cluster.servers), Counter[str]()))
        self.transports = cluster.diaries.transports()


def _by_range(values: Iterable[object]) -> str:
    return " · ".join(map(str, values))


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
