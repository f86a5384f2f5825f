"""Makes the runs that have no result yet: `python -m benchmarks.finals`."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import click
import torch

from benchmarks.finals import plan
from benchmarks.finals.runs import Outcome, Run, make, stored
from benchmarks.versus.models import GOALS, Problem

RESULTS = Path(__file__).parents[2] / "docs/results/versus"
_problems: dict[str, Problem] = {}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("questions", nargs=-1, type=click.Choice(list(plan.QUESTIONS)))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--processes", default=1, show_default=True, help="Runs made at the same time.")
def main(questions: tuple[str, ...], data: Path | None, processes: int) -> None:
    """Makes the runs without a result for the QUESTIONS, by default all. A result is saved at once."""
    store = stored(RESULTS / "finals.json")
    missing = [run for run in plan.runs(questions or plan.QUESTIONS) if run not in store and (data or run.model != "convnet")]
    click.echo(f"{len(missing)} runs")
    with ProcessPoolExecutor(processes) as pool:
        for future in as_completed({pool.submit(_make, run, data): run for run in missing}):
            run, outcome, seconds = future.result()
            store.add(run, outcome)
            click.echo(
                f"{run}: {outcome.loss} {outcome.accuracy or ''} ({outcome.gradients} gradients, {outcome.commits} commits; {seconds:.0f} s)"
            )


def _make(run: Run, data: Path | None) -> tuple[Run, Outcome, float]:
    torch.set_num_threads(1)
    began = time.monotonic()
    if run.model not in _problems:
        _problems[run.model] = GOALS[run.model].make(data)
    return run, make(run, _problems[run.model]), time.monotonic() - began


if __name__ == "__main__":
    main()
