"""Makes the runs that have no result yet, then the page: `python -m benchmarks.many_workers --data DIR`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import torch
from gem_api.process.lifetime import interruptible
from gem_worker.tasks import Task, TaskError, load_task

from benchmarks.lib.results import Store
from benchmarks.lib.runs import make_missing
from benchmarks.many_workers import check, in_step, rivals, runs
from benchmarks.many_workers.page import write_page
from benchmarks.paper.experiments import Experiment

RESULTS = Path(__file__).parents[2] / "docs/results/many-workers"
PARTS = ("check", "order", "number", "in-step", "rivals")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@interruptible()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Make only these runs. [default: all]")
def main(data: Path | None, parts: tuple[str, ...]) -> None:
    """Makes the runs without a result, if --data names MNIST, then draws the page and its pictures.

    All parts take some hours. A result is saved at once; several processes may make different parts. The rivals use all cores.
    """
    torch.set_num_threads(1)
    missing = () if data is None else _missing(_task(data), data, parts or PARTS)
    make_missing(missing, lambda run: run(), _draw)


def _draw() -> Path:
    known, tuned = runs.stored(RESULTS / "runs.json"), rivals.stored(RESULTS / "rivals.json")
    held = rivals.stored(RESULTS / "in-step.json")
    return write_page(known, check.load(RESULTS / "check.json"), tuned, held, RESULTS)


def _task(data: Path) -> Task:
    try:
        return load_task("mnist", data)
    except TaskError as error:
        raise click.UsageError(str(error)) from None


def _missing(task: Task, data: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], str]]]:
    """The missing runs of these parts, each with its name, and a function that makes it."""
    if "check" in parts:
        compared = RESULTS / "check.json"
        for workers in set(check.WORKERS) - {each.workers for each in check.load(compared)}:
            yield f"gem-train with {workers} workers, then simulated", partial(check.compare, workers, task, data, compared)
    store = runs.stored(RESULTS / "runs.json")
    cases = runs.order_cases() * ("order" in parts) + runs.number_cases() * ("number" in parts)
    for case in dict.fromkeys(cases):
        if case not in store:
            yield str(case), partial(runs.measure_and_keep, case, task, store)
    if "in-step" in parts:
        held = rivals.stored(RESULTS / "in-step.json")
        for case in in_step.cases():
            if case not in held:
                yield f"{case}", partial(_measure_and_keep, case, task, held)
    if "rivals" in parts:
        tuned = rivals.stored(RESULTS / "rivals.json")
        yield "the rivals' rates", partial(rivals.tune_all, data, tuned, processes=len(os.sched_getaffinity(0)))


def _measure_and_keep(case: Experiment, task: Task, store: Store[Experiment, rivals.Outcome]) -> str:
    store.add(case, outcome := rivals.measure(case, task))
    return str(outcome)


if __name__ == "__main__":
    main()
