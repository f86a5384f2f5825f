"""Makes the runs that have no result yet: `python -m benchmarks.finals`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.finals import figure, plan, real
from benchmarks.finals.page import write_page
from benchmarks.finals.runs import MODELS, Outcome, Run, make, stored
from benchmarks.lib import wire
from benchmarks.lib.results import Store
from benchmarks.lib.runs import make_missing
from benchmarks.versus.models import Problem

RESULTS = Path(__file__).parents[2] / "docs/results/versus"
_problems: dict[str, Problem] = {}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("questions", nargs=-1, type=click.Choice(list(plan.QUESTIONS)))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--real", "is_real", is_flag=True, help="Makes those with real processes instead, one after the other.")
@click.option("--processes", default=1, show_default=True, help="Runs made at the same time.")
def main(questions: tuple[str, ...], data: Path | None, is_real: bool, processes: int) -> None:
    """Makes the runs without a result for the QUESTIONS, by default all. A result is saved at once."""
    store = stored(RESULTS / "finals.json")
    if is_real:
        make_missing(_real(store, data), partial(_make_real, store, data), lambda: _write(store))
        return
    missing = [run for run in _with_data(plan.runs(questions or plan.QUESTIONS), data) if run not in store]
    click.echo(f"{len(missing)} runs")
    try:
        _make_all(missing, data, processes, store)
    finally:
        click.echo(f"results: {_write(stored(RESULTS / 'finals.json'))}")


def _write(store: Store[Run, Outcome]) -> Path:
    """Writes the page with its figure, and returns the page's path."""
    return write_page(store, RESULTS, figure.draw(store, RESULTS))


def _with_data(runs: Iterable[Run], data: Path | None) -> list[Run]:
    """Those that need no data, or have it."""
    return [run for run in runs if data or run.model != "convnet"]


def _real(store: Store[Run, Outcome], data: Path | None) -> Iterator[tuple[str, Run]]:
    """The missing runs with real processes that this machine can make."""
    missing = [
        run for run in _with_data(real.runs(store), data) if run not in store and (run.profile != "far" or wire.possible())
    ]
    click.echo(f"{len(missing)} runs")
    for run in missing:
        yield str(run), run


def _make_real(store: Store[Run, Outcome], data: Path | None, run: Run) -> str:
    store.add(run, outcome := real.make(run, data))
    _write(store)
    return f"{outcome.loss} ({outcome.gradients} gradients, {outcome.commits} commits)"


def _make_all(missing: list[Run], data: Path | None, processes: int, store: Store[Run, Outcome]) -> None:
    with ProcessPoolExecutor(processes) as pool:
        for future in as_completed({pool.submit(_make, run, data): run for run in missing}):
            run, outcome, seconds = future.result()
            store.add(run, outcome)
            used = f"{outcome.gradients} gradients, {outcome.commits} commits"
            click.echo(f"{run}: {outcome.loss} {outcome.accuracy or ''} ({used}; {seconds:.0f} s)")


def _make(run: Run, data: Path | None) -> tuple[Run, Outcome, float]:
    torch.set_num_threads(1)
    began = time.monotonic()
    if run.model not in _problems:
        _problems[run.model] = MODELS[run.model](data)
    return run, make(run, _problems[run.model]), time.monotonic() - began


if __name__ == "__main__":
    main()
