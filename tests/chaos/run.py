"""A chaos run: servers and workers are killed with -9, and connections are cut. At the end a checker looks for lost commits.

`make chaos` runs the long one: `python -m chaos.run --help`.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from chaos import disk
from chaos.checker import Verdict, check
from chaos.cluster import Cluster
from chaos.worker import Kind
from gem_api.process.lifetime import interruptible

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
class Report:
    """The faults that a cluster had, and the results."""

    seed: int
    parameters: int
    server_kills: int = 0
    server_kills_while_starting: int = 0
    worker_kills: int = 0
    connections: dict[str, int] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    serving_seconds: list[float] = field(default_factory=list)
    first_acknowledgement_seconds: list[float] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)

    def as_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "verdict"}
        return {**fields, **self.verdict.as_dict()}

    def text(self) -> str:
        verdict, cuts = self.verdict, ", ".join(f"{count} {kind}" for kind, count in sorted(self.connections.items()))
        lines = {
            "model": f"{self.parameters} parameters, {len(KINDS)} workers, seed {self.seed}, {self.seconds:.0f} s",
            "killed with -9": f"server {self.server_kills} times, {self.server_kills_while_starting} more while it started; "
            f"workers {self.worker_kills} times",
            "connections": cuts,
            "commits by transport": ", ".join(f"{count} {via}" for via, count in self.transports.items()),
            "commits": f"{verdict.acknowledged} acknowledged, {verdict.applied} applied, {verdict.resent} tried more than once",
            "lost": verdict.lost,
            "doubled": verdict.doubled,
            "not as sent": verdict.strange,
            "θ seen": f"{verdict.thetas_seen} times, {verdict.thetas_wrong} wrong",
            "checkpoints": f"{verdict.checkpoints}, {verdict.checkpoints_wrong} not equal to the replay",
            "final θ": "equal to the replay, bit for bit" if verdict.theta_equal else "NOT the replay's",
            "start to serving": _spread(self.serving_seconds),
            "start to first acknowledgement": _spread(self.first_acknowledgement_seconds),
        }
        return "\n".join([f"{name:32}{value}" for name, value in lines.items()] + verdict.problems)


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"


def run(folder: Path, *, seed: int, server_kills: int, worker_kills: int, parameters: int, bytes_between_faults: int) -> Report:
    """Causes all faults in a cluster, in an order and at times drawn from the seed, and checks the result."""
    chance, report, began = random.Random(seed), Report(seed, parameters), time.monotonic()
    victims = ["server"] * server_kills + ["worker"] * worker_kills
    chance.shuffle(victims)
    cluster = Cluster(folder, seed, parameters, KINDS, bytes_between_faults=bytes_between_faults)
    try:
        cluster.wait_acknowledged(10)
        for victim in victims:
            if victim == "server":
                _kill_server(cluster, chance, report)
            else:
                cluster.kill_worker(chance.randrange(len(KINDS)), renamed=chance.random() < 0.5)
                report.worker_kills += 1
            cluster.wait_acknowledged(chance.choice((0, 1, 5, 30)))
        cluster.wait_acknowledged(50)
        cluster.finish()
    finally:
        cluster.close()
    report.connections = dict(cluster.proxy.faults + cluster.lane_proxy.faults)
    report.transports = cluster.diaries.transports()
    report.verdict = check(cluster.checkpoints, cluster.diaries.paths())
    report.seconds = time.monotonic() - began
    return report


def _kill_server(cluster: Cluster, chance: random.Random, report: Report) -> None:
    """Kills and restarts the server. Sometimes the new one is killed too, before it serves."""
    cluster.kill_server()
    report.server_kills += 1
    cluster.start_server()
    if chance.random() < 0.2:
        cluster.wait_server(chance.choice(_MOMENTS))
        cluster.kill_server()
        report.server_kills_while_starting += 1
        cluster.start_server()
    began = time.monotonic()
    cluster.wait_server("serving")
    report.serving_seconds.append(time.monotonic() - began)
    cluster.wait_acknowledged(1)
    report.first_acknowledgement_seconds.append(time.monotonic() - began)


@click.command()
@click.option("--server-kills", default=100, show_default=True)
@click.option("--worker-kills", default=100, show_default=True)
@click.option(
    "--parameters", default=300_000, show_default=True, help="Size of the model; beyond 262,144 a gradient has two chunks."
)
@click.option("--bytes-between-faults", default=20_000_000, show_default=True, help="Of a connection, on average.")
@click.option("--seed", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/chaos"), show_default=True)
@interruptible()
def main(out: Path, **plan: int) -> None:
    """Kills processes, cuts connections and fills a disk. Prints the result, and writes it to OUT/report.json."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out))
    report = run(folder / "kills", **plan)
    click.echo(report.text())
    disk_full = disk.run(folder / "disk", plan["seed"])
    click.echo(disk_full.text())
    results = {**report.as_dict(), "disk_full": disk_full.as_dict()}
    (out / "report.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not (report.verdict.good and disk_full.good):
        click.echo(f"BROKEN: what the processes left is in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
