"""Measures round trips per second: of this server, of alternatives that users might choose, and of the floors (only the
transfer, or only the arithmetic).

`python -m benchmarks.peers`; benchmarks/README.md says how to read what it prints.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED

from benchmarks.lib import machine
from benchmarks.lib.measuring import measurement
from benchmarks.peers.claims import LARGE, MIDDLE, SMALL, rate, table, verdicts
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.contenders.base import PROCESSES, Contender, ContenderFailedError
from benchmarks.peers.harness import measure
from benchmarks.peers.picture import draw
from benchmarks.peers.results import Cell, Results

_PROCESS_BYTES = 150 << 20  # memory of a process that is forked from one that has imported PyTorch
_SHARE_OF_MEMORY = 0.9  # maximum share of the available memory to use
_QUICK = {"parameters": (SMALL, MIDDLE), "workers": (4,), "repeats": 1, "seconds": 1.5}


@measurement(parameters=(SMALL, MIDDLE, LARGE), workers=(4, 16), repeats=5, seconds=4.0, out=Path("runs/throughput"))
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help=f"Contenders to measure, by name or its beginning: {', '.join(each.name for each in CONTENDERS)}.",
)
@click.option("--quick", is_flag=True, help="Under three minutes: fewer sizes, workers and repeats; rough figures.")
@click.option("--resume", is_flag=True, help="Continue the measurements in the folder --out.")
@click.pass_context
def main(
    context: click.Context, parameters: tuple[int, ...], workers: tuple[int, ...], repeats: int, seconds: float,
    only: tuple[str, ...], quick: bool, out: Path, resume: bool,
) -> None:  # fmt: skip
    """Measures every contender in fresh processes, one after the other, in a different order in each repeat."""
    settings: dict[str, Any] = {"parameters": parameters, "workers": workers, "repeats": repeats, "seconds": seconds}
    if quick:
        given = {name for name in settings if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
        settings |= {name: value for name, value in _QUICK.items() if name not in given}
        click.echo("--quick: fewer sizes, workers and repeats, each shorter; the figures are rougher than those of a full run")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "throughput.json"
    results = Results.load(path) if resume and path.exists() else Results(path, settings)
    chosen = _available(each for each in CONTENDERS if not only or each.name.startswith(only))
    results.describe(chosen)
    PROCESSES.set_forkserver_preload(["benchmarks.peers.contenders", *(["torch"] if find_spec("torch") else [])])
    cells = [Cell(size, count) for size in settings["parameters"] for count in settings["workers"]]
    try:
        run(results, chosen, cells, settings["repeats"], settings["seconds"], out / "log.txt")
    except KeyboardInterrupt:
        click.echo("interrupted; continue with --resume")
        report(results, out)
        raise SystemExit(EXIT_INTERRUPTED) from None
    report(results, out)


def report(results: Results, out: Path) -> None:
    """Prints the tables and the claims, and draws the picture."""
    for cell in results.cells():
        click.echo(f"\n{table(results, cell)}")
    if not results.cells():
        return
    click.echo("\nClaims (ratios of rates, medians of the repeats):")
    for line in verdicts(results):
        click.echo(line)
    for (cell, name), why in results.left_out.items():
        click.echo(f"left out at P = {cell.parameters:,}, W = {cell.workers}: {name}: {why}")
    draw(results, out / "throughput.png")
    click.echo(f"\nwritten: {results.path}, {out / 'throughput.png'}")


def run(results: Results, contenders: list[Contender], cells: list[Cell], repeats: int, seconds: float, log: Path) -> None:
    """Makes the measurements that `results` lacks, each contender once in a repeat, in another order each time; saves each."""
    plan = [
        (cell, each, repeat)
        for cell in cells
        for repeat in range(repeats)
        for each in random.Random(f"{cell} {repeat}").sample(contenders, len(contenders))
        if repeat not in results.measurements.get((cell, each.name), ())
    ]
    for number, (cell, contender, repeat) in enumerate(plan, 1):
        if (cell, contender.name) in results.left_out:
            continue
        what = f"[{number}/{len(plan)}] P = {cell.parameters:,}, W = {cell.workers}, repeat {repeat + 1}: {contender.label}"
        try:
            _require_room(cell, contender)
            figures = measure(contender, cell.parameters, cell.workers, seconds, log)
        except Exception as error:  # any failure: the other contenders are still measured
            why = str(error) if isinstance(error, ContenderFailedError) else f"{type(error).__name__}: {error}"
            results.left_out[cell, contender.name] = why
            click.echo(f"{what}: left out: {why} (more in {log})")
        else:
            results.add(cell, contender.name, repeat, figures)
            click.echo(f"{what}: {rate(figures.rate)}/s")
        results.save()


def _require_room(cell: Cell, contender: Contender) -> None:
    """Raises ContenderFailedError if a contender's estimated memory exceeds what is available."""
    needed = 4 * cell.parameters * cell.workers * contender.buffers + (contender.processes(cell.workers) + 1) * _PROCESS_BYTES
    room = _SHARE_OF_MEMORY * machine.available_bytes()
    if needed > room:
        raise ContenderFailedError(f"it needs about {needed / 1e9:.1f} GB of memory, but only {room / 1e9:.1f} GB are free")


def _available(contenders: Iterable[Contender]) -> list[Contender]:
    """The contenders whose modules are installed. Prints what to install for the others."""
    found = []
    for each in contenders:
        if each.requires is None or find_spec(each.requires):
            found.append(each)
        else:
            click.echo(f"skipped: {each.label}: {each.requires} is missing; {each.install}")
    return found


if __name__ == "__main__":
    main()
