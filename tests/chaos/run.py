"""A chaos run: servers and workers are killed with -9, and connections are cut. At the end a checker looks for lost commits.

`make chaos` runs the long one: `python -m chaos.run --help`.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
from chaos import disk, ranges_run
from chaos.checker import Verdict, check
from chaos.cluster import Cluster
from chaos.faults import KINDS, Faults
from gem_api.process.lifetime import interruptible

PHASES = ("one", "ranges", "disk")


@dataclass
class Report(Faults):
    """The faults that a cluster with one server had, and the results."""

    verdict: Verdict = field(default_factory=Verdict)

    @property
    def good(self) -> bool:
        return self.verdict.good

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), **self.verdict.as_dict()}

    def text(self) -> str:
        verdict = self.verdict
        lines = {
            **self.lines(),
            "commits": f"{verdict.acknowledged} acknowledged, {verdict.applied} applied, {verdict.resent} tried more than once",
            "lost": verdict.lost,
            "doubled": verdict.doubled,
            "not as sent": verdict.strange,
            "θ seen": f"{verdict.thetas_seen} times, {verdict.thetas_wrong} wrong",
            "checkpoints": f"{verdict.checkpoints}, {verdict.checkpoints_wrong} not equal to the replay",
            "final θ": "equal to the replay, bit for bit" if verdict.theta_equal else "NOT the replay's",
        }
        return "\n".join([f"{name:32}{value}" for name, value in lines.items()] + verdict.problems)


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
                cluster.lead.kill()
                report.server_kills += 1
                report.restart(cluster.lead, chance)
                report.wait_for_service(cluster, [cluster.lead])
            else:
                report.kill_worker(cluster, chance)
            cluster.wait_acknowledged(chance.choice((0, 1, 5, 30)))
        cluster.wait_acknowledged(50)
        cluster.finish()
    finally:
        cluster.close()
    report.count_connections(cluster)
    report.verdict = check(cluster.lead.checkpoints, cluster.diaries.paths())
    report.seconds = time.monotonic() - began
    return report


class _Result(Protocol):
    """The report of a phase."""

    @property
    def good(self) -> bool: ...

    def as_dict(self) -> dict[str, Any]: ...

    def text(self) -> str: ...


@click.command()
@click.option("--server-kills", default=100, show_default=True)
@click.option("--worker-kills", default=100, show_default=True)
@click.option("--range-kills", default=40, show_default=True, help="Of each of two servers that hold a range each.")
@click.option("--range-worker-kills", default=40, show_default=True, help="Of their workers; 0: no commit should be torn.")
@click.option(
    "--parameters", default=300_000, show_default=True, help="For each server; beyond 262,144 a gradient has two chunks."
)
@click.option("--bytes-between-faults", default=20_000_000, show_default=True, help="Of a connection, on average.")
@click.option("--seed", default=1, show_default=True)
@click.option("--phase", "phases", multiple=True, type=click.Choice(PHASES), help="What to do; all by default.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/chaos"), show_default=True)
@interruptible()
def main(
    out: Path,
    phases: Sequence[str],
    server_kills: int,
    worker_kills: int,
    range_kills: int,
    range_worker_kills: int,
    parameters: int,
    bytes_between_faults: int,
    seed: int,
) -> None:
    """Kills processes and cuts connections, of one server and of two that hold a range of the model each, and fills a disk.
    Prints the results, and writes them to OUT/report.json."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out))
    results: dict[str, _Result] = {}
    for phase in phases or PHASES:
        if phase == "one":
            results[phase] = run(
                folder / "kills", seed=seed, server_kills=server_kills, worker_kills=worker_kills, parameters=parameters,
                bytes_between_faults=bytes_between_faults,
            )  # fmt: skip
        elif phase == "ranges":
            results[phase] = ranges_run.run(
                folder / "ranges", seed=seed, server_kills=range_kills, worker_kills=range_worker_kills,
                suspensions=min(3, range_worker_kills), parameters=ranges_run.SERVERS * parameters,
                bytes_between_faults=bytes_between_faults, progress=click.echo,
            )  # fmt: skip
        else:
            results[phase] = disk.run(folder / "disk", seed)
        click.echo(results[phase].text())
    names = {"ranges": "ranges", "disk": "disk_full"}
    written = results["one"].as_dict() if "one" in results else {}
    written |= {names[phase]: result.as_dict() for phase, result in results.items() if phase in names}
    (out / "report.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if not all(result.good for result in results.values()):
        click.echo(f"BROKEN: what the processes left is in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
