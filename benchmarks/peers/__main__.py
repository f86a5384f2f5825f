"""Measures round trips per second: of this server, of alternatives that users might choose, and of the floors (only the
transfer, or only the arithmetic): `python -m benchmarks.peers`; benchmarks/README.md says how to read what it prints."""

from __future__ import annotations

import random
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED
from gem_worker.launcher.cluster import free_port

from benchmarks.lib import load
from benchmarks.lib.load import PROCESSES, LoadFailed
from benchmarks.lib.measuring import measurement
from benchmarks.lib.page import short
from benchmarks.lib.style import save
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.contenders.base import Contender, Place, checked_worker
from benchmarks.peers.picture import figure
from benchmarks.peers.results import (
    LARGE,
    MIDDLE,
    SMALL,
    Cell,
    Figures,
    Measurement,
    Results,
    as_table,
    cells,
    stored,
    verdicts,
)

_QUICK = {"parameters": (SMALL, MIDDLE), "workers": (4,), "repeats": 1, "seconds": 1.5}
_NAMES = ", ".join(each.name for each in CONTENDERS)


@measurement(parameters=(SMALL, MIDDLE, LARGE), workers=(4,), repeats=5, seconds=4.0, out=Path("runs/throughput"))
@click.option("--only", multiple=True, metavar="NAME", help=f"Contenders to measure, by name or its beginning: {_NAMES}.")
@click.option("--quick", is_flag=True, help="Under three minutes: fewer sizes and repeats; rough figures.")
@click.option("--resume", is_flag=True, help="Continue the measurements in the folder --out.")
@click.pass_context
def main(
    context: click.Context, /, only: tuple[str, ...], quick: bool, out: Path, resume: bool, **settings: Any
) -> None:  # fmt: skip
    """Measures every contender in fresh processes, one after the other, in a different order in each repeat."""
    if quick:
        given = {name for name in settings if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
        settings |= {name: value for name, value in _QUICK.items() if name not in given}
        click.echo("--quick: fewer sizes and repeats, each shorter; the figures are rougher than those of a full run")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "throughput.json"
    if not resume:
        path.unlink(missing_ok=True)
    results = stored(path, settings)
    chosen = [each for each in CONTENDERS if not only or each.name.startswith(only)]
    PROCESSES.set_forkserver_preload(["benchmarks.peers.contenders", *(["torch"] if find_spec("torch") else [])])
    wanted = [Cell(size, count) for size in settings["parameters"] for count in settings["workers"]]
    try:
        run(results, chosen, wanted, settings["repeats"], settings["seconds"], out / "log.txt")
    except KeyboardInterrupt:
        click.echo("interrupted; continue with --resume")
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        report(results, out)


def report(results: Results, out: Path) -> None:
    """Prints the tables and the claims, and draws the picture."""
    if not results:
        return
    click.echo("".join(f"\n{as_table(results, cell)}\n" for cell in cells(results)))
    click.echo("\n".join(verdicts(results)))
    save(figure(results), out / "throughput.png")
    click.echo(f"\nwritten: {results.path}, {out / 'throughput.png'}")


def run(results: Results, contenders: list[Contender], wanted: list[Cell], repeats: int, seconds: float, log: Path) -> None:
    """Makes the measurements that `results` lacks, each contender once in a repeat, in another order each time; saves each. A
    contender that fails is left out: the others are still measured."""
    plan = [
        (Measurement(cell.parameters, cell.workers, each.name, repeat), each)
        for cell in wanted
        for repeat in range(repeats)
        for each in random.Random(f"{cell} {repeat}").sample(contenders, len(contenders))
    ]
    failed: set[tuple[Cell, str]] = set()
    for number, (key, contender) in enumerate(plan, 1):
        if key in results or (key.cell, contender.name) in failed:
            continue
        what = f"[{number}/{len(plan)}] {key.cell}, repeat {key.repeat + 1}: {contender.label}"
        try:
            click.echo(f"{what}: {short(results.add(key, measure(contender, key.cell, seconds, log)).rate)}/s")
        except Exception as error:
            failed.add((key.cell, contender.name))
            why = str(error) if isinstance(error, LoadFailed) else f"{type(error).__name__}: {error}"
            click.echo(f"{what}: left out: {why} (more in {log})")


def measure(contender: Contender, cell: Cell, seconds: float, log: Path) -> Figures:
    """Measures one contender with fresh processes. Raises LoadFailed."""
    place = Place(free_port(), cell.parameters, cell.workers, log)
    with contender.server(place) as roots:
        found = load.measure(partial(checked_worker, contender, place), [1] * contender.processes(cell.workers), seconds, roots)
    return Figures(**{each.name: getattr(found, each.name) for each in fields(Figures)})


if __name__ == "__main__":
    main()
