"""The faults that a chaos run causes in a cluster, how many there were, and what came of them."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from chaos.checker import Verdict
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
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)

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
