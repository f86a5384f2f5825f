"""Makes the runs that have no result yet, then the page: `python -m benchmarks.many_workers --data DIR`."""

from __future__ import annotations

import os
from pathlib import Path

import click
import torch
from gem_api.process.lifetime import interruptible
from gem_worker.tasks import Task, TaskError, load_task

from benchmarks.many_workers import check, rivals, runs
from benchmarks.many_workers.page import write_page
from benchmarks.many_workers.simulation import Row

RESULTS = Path(__file__).parents[2] / "docs/results/many-workers"
PARTS = ("check", "order", "number", "rivals")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@interruptible()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Make only these runs. [default: all]")
def main(data: Path | None, parts: tuple[str, ...]) -> None:
    """Makes the runs without a result, if --data names MNIST, then draws the page and its pictures.

    All parts take some hours. A result is saved at once; several processes may make different parts. The rivals use all cores.
    """
    torch.set_num_threads(1)
    if data is not None:
        try:
            task = load_task("mnist", data)
        except TaskError as error:
            raise click.UsageError(str(error)) from None
        for part in parts or PARTS:
            {"check": _check, "order": _order, "number": _number, "rivals": _rivals}[part](task, data)
    known, tuned = runs.stored(RESULTS / "runs.json"), rivals.stored(RESULTS / "rivals.json")
    write_page(known, check.load(RESULTS / "check.json"), tuned, RESULTS)
    click.echo(f"results: {RESULTS / 'README.md'}")


def _check(task: Task, data: Path) -> None:
    stored = RESULTS / "check.json"
    done = check.load(stored)
    for workers in check.WORKERS:
        if workers not in {one.workers for one in done}:
            click.echo(f"gem-train with {workers} workers, then the same order simulated")
            done.append(check.compare(workers, task, data))
            check.save(stored, done)


def _order(task: Task, data: Path) -> None:
    _make(runs.order_cases(), task)


def _number(task: Task, data: Path) -> None:
    _make(runs.number_cases(), task)


def _make(cases: list[runs.Case], task: Task) -> None:
    stored = runs.stored(RESULTS / "runs.json")
    for number, case in enumerate(cases, 1):
        if case in stored:
            continue
        click.echo(f"[{number}/{len(cases)}] {case}")

        def tell(row: Row, case: runs.Case = case) -> None:
            if row["version"] % (case.workers * max(1, case.steps // 6)) == 0:
                click.echo(f"  {row['version']:.0f} of {case.workers * case.steps} commits, loss {row['loss']:.3f}")

        stored.add(case, runs.measure(case, task, tell))


def _rivals(task: Task, data: Path) -> None:
    def tell(trial: rivals.Trial, outcome: rivals.Outcome) -> None:
        shown = f"final loss {outcome.final_loss:.3f}, accuracy {100 * outcome.accuracy:.2f} %"
        click.echo(
            f"{trial.workers} workers, {trial.order}, {trial.label}, η = {trial.learning_rate:g}, seed {trial.seed}: {shown}"
        )

    rivals.tune_all(data, rivals.stored(RESULTS / "rivals.json"), tell, processes=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
