"""Makes the runs that have no result yet, then the page: `python -m benchmarks.many_workers --data DIR`."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from gem_worker.tasks import load_task

from benchmarks.many_workers.check import WORKERS, compare
from benchmarks.many_workers.check import load as load_checks
from benchmarks.many_workers.check import save as save_checks
from benchmarks.many_workers.page import write_page
from benchmarks.many_workers.runs import Case, load, measure, plan, save
from benchmarks.many_workers.simulation import Row

RESULTS = Path(__file__).parents[2] / "docs/results/many-workers"


@click.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--workers", type=int, help="Make only the runs with so many workers.")
def main(data: Path | None, workers: int | None) -> None:
    """Makes the runs without a result, if --data names MNIST, then draws the page and its pictures."""
    torch.set_num_threads(1)
    stored = RESULTS / "runs.json"
    runs = load(stored)
    if data is not None:
        task = load_task("mnist", data)
        for case in plan():
            if case in runs or workers not in (None, case.workers):
                continue
            click.echo(f"{case}")
            runs[case] = measure(case, task, lambda row, case=case: _tell(row, case))  # type: ignore[misc]
            runs = load(stored) | {case: runs[case]}  # another process may have made others
            save(stored, (runs[each] for each in plan() if each in runs))
        if workers is None:
            checked = RESULTS / "check.json"
            missing = [each for each in WORKERS if each not in {one.workers for one in load_checks(checked)}]
            save_checks(checked, [*load_checks(checked), *(compare(each, task, data) for each in missing)])
    write_page(runs, load_checks(RESULTS / "check.json"), RESULTS)


def _tell(row: Row, case: Case) -> None:
    every = case.workers * max(1, case.steps // 6)
    if row["version"] % every == 0:
        click.echo(f"  {row['version']:.0f} commits, loss {row['loss']:.3f}, accuracy {100 * row['accuracy']:.2f} %")


if __name__ == "__main__":
    main()
