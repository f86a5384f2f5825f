"""Measures round trips per second: of this server, of alternatives that users might choose, and of the floors (only the
transfer, or only the arithmetic): `python -m benchmarks.peers`; benchmarks/README.md says how to read what it prints."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED

from benchmarks.lib.measuring import measurement
from benchmarks.lib.page import short
from benchmarks.lib.style import save
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.contenders.base import PROCESSES, Contender, ContenderFailedError
from benchmarks.peers.harness import measure
from benchmarks.peers.picture import figure
from benchmarks.peers.results import LARGE, MIDDLE, SMALL, Cell, Results, as_table, verdicts

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
    results = Results.load(path) if resume and path.exists() else Results(path, settings)
    chosen = [each for each in CONTENDERS if not only or each.name.startswith(only)]
    results.describe(chosen)
    PROCESSES.set_forkserver_preload(["benchmarks.peers.contenders", *(["torch"] if find_spec("torch") else [])])
    cells = [Cell(size, count) for size in settings["parameters"] for count in settings["workers"]]
    try:
        run(results, chosen, cells, settings["repeats"], settings["seconds"], out / "log.txt")
    except KeyboardInterrupt:
        click.echo("interrupted; continue with --resume")
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        report(results, out)


def report(results: Results, out: Path) -> None:
    """Prints the tables and the claims, and draws the picture."""
    if not results.cells():
        return
    click.echo("".join(f"\n{as_table(results, cell)}\n" for cell in results.cells()))
    click.echo("\n".join(verdicts(results)))
    for (cell, name), why in results.left_out.items():
        click.echo(f"left out at {cell}: {name}: {why}")
    save(figure(results), out / "throughput.png")
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
        what = f"[{number}/{len(plan)}] {cell}, repeat {repeat + 1}: {contender.label}"
        try:
            figures = measure(contender, cell.parameters, cell.workers, seconds, log)
        except Exception as error:  # any failure: the other contenders are still measured
            why = str(error) if isinstance(error, ContenderFailedError) else f"{type(error).__name__}: {error}"
            results.left_out[cell, contender.name] = why
            click.echo(f"{what}: left out: {why} (more in {log})")
        else:
            results.add(cell, contender.name, repeat, figures)
            click.echo(f"{what}: {short(figures.rate)}/s")
        results.save()


if __name__ == "__main__":
    main()
