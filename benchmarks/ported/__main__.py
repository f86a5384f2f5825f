"""Makes the runs of others' programs that have no result yet, then the page: `python -m benchmarks.ported --sources DIR`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
from gem_api.process.lifetime import interruptible

from benchmarks.lib.runs import Wanted, make_missing
from benchmarks.ported.page import agrees, draw
from benchmarks.ported.program import load, names
from benchmarks.ported.runs import KINDS, NOISE, ROOT, Bench, Run, make, stored

RESULTS = ROOT / "docs/results/ported"
_FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)


def plan(chosen: Sequence[str], seeds: int | None, bench: Bench) -> Wanted:
    """The runs, a whole seed after the other."""
    for program in map(load, chosen):
        store = stored(RESULTS, program.name)
        for seed in range(program.seeds if seeds is None else seeds):
            for kind in KINDS:
                yield store, Run(kind, seed), partial(make, program, Run(kind, seed), bench)
        if not agrees(store):
            yield store, Run(NOISE, 0), partial(make, program, Run(NOISE, 0), bench)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@interruptible()
@click.argument("chosen", nargs=-1, metavar="[NAME]...", type=click.Choice(names()))
@click.option("--sources", type=_FOLDER, help="Folder of the programs' repositories, each as owner+name. Needed to run.")
@click.option("--data", type=_FOLDER, help="Folder of MNIST's four files.")
@click.option("--seeds", type=click.IntRange(1), help="Number of seeds.  [default: each program's own]")
@click.option("--table", is_flag=True, help="Make no runs.")
@click.option("--work", type=_FOLDER, help="Keep what the programs write in this folder.")
def main(
    chosen: tuple[str, ...], sources: Path | None, data: Path | None, seeds: int | None, table: bool, work: Path | None
) -> None:
    """Makes the runs of the programs NAME [all] that have no result, alone and as workers, then docs/results/ported.md."""
    if sources is None and not table:
        raise click.UsageError("--sources is missing: the folder of the programs' repositories; or give --table")
    with ExitStack() as kept:
        place = work or Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="gem-ported-")))
        wanted = plan(chosen or names(), seeds, Bench(sources, place, data)) if sources and not table else ()
        make_missing(wanted, partial(draw, RESULTS))


if __name__ == "__main__":
    main()
