"""The long chaos run, `make chaos`: one server, then two that hold a range of the model each, then a full disk."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from chaos import disk
from chaos.attack import attack
from chaos.report import KINDS, PACED, Report
from gem_api.process.lifetime import interruptible

PHASES = ("one", "ranges", "disk")


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
    results: dict[str, Report | disk.DiskReport] = {}
    for phase in phases or PHASES:
        if phase == "disk":
            results[phase] = disk.run(folder / phase, seed)
        else:
            servers, kills, workers = (
                (1, server_kills, worker_kills) if phase == "one" else (2, range_kills, range_worker_kills)
            )
            results[phase] = attack(
                folder / phase, servers=servers, seed=seed, server_kills=kills, worker_kills=workers,
                suspensions=min(3, workers) if servers > 1 else 0, parameters=servers * parameters,
                optimizer="sgd" if phase == "one" else "adamw",
                kinds=KINDS if phase == "one" else PACED, in_step=phase == "ranges",
                bytes_between_faults=bytes_between_faults, progress=click.echo,
            )  # fmt: skip
        click.echo(results[phase].text())
    written = {phase: result.as_dict() for phase, result in results.items()}
    (out / "report.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if not all(result.good for result in results.values()):
        click.echo(f"BROKEN: what the processes left is in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
