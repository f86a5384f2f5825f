"""The faults that a chaos run causes in a cluster, and how many there were."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from chaos.cluster import Cluster
from chaos.server_process import ServerProcess
from chaos.worker import Kind

KINDS = [
    Kind(shared_memory=True, proxied=False),
    Kind(shared_memory=True, overlap=True),
    Kind(shards=True),
    Kind(overlap=True),
    Kind(gradient_dtype="bfloat16", theta_dtype="bfloat16"),
    Kind(gradient_dtype="int8"),
]
# A server may die at any moment of its start, too: once it has printed one of these, or nothing yet.
_MOMENTS = ("", "resumed", "checkpoint written", "serving")


@dataclass
class Faults:
    """The faults that a cluster had."""

    seed: int
    parameters: int
    workers: int = len(KINDS)
    server_kills: int = 0
    server_kills_while_starting: int = 0
    worker_kills: int = 0
    connections: dict[str, int] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    serving_seconds: list[float] = field(default_factory=list)
    first_acknowledgement_seconds: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "verdict"}

    def lines(self) -> dict[str, object]:
        """The faults in words, by what they are of."""
        return {
            "model": f"{self.parameters} parameters, {self.workers} workers, seed {self.seed}, {self.seconds:.0f} s",
            "killed with -9": f"server {self.server_kills} times, {self.server_kills_while_starting} more while it started; "
            f"workers {self.worker_kills} times",
            "connections": ", ".join(f"{count} {kind}" for kind, count in sorted(self.connections.items())),
            "commits by transport": ", ".join(f"{count} {via}" for via, count in self.transports.items()),
            "start to serving": _spread(self.serving_seconds),
            "start to first acknowledgement": _spread(self.first_acknowledgement_seconds),
        }

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


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
