"""Makes the runs that have no result yet, then the page: `python -m benchmarks.unequal_data --data DIR`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from gem_api.process.lifetime import interruptible
from gem_worker.tasks import TaskError, load_task

from benchmarks.lib.runs import make_missing
from benchmarks.unequal_data.page import write_page
from benchmarks.unequal_data.runs import SLOWER, Case, Digits, measure, stored, wanted

RESULTS = Path(__file__).parents[2] / "docs/results/unequal-data"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@interruptible()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
@click.option("--slower", type=click.Choice([str(each) for each in SLOWER]), multiple=True, help="Only this degree. [all]")
def main(data: Path | None, slower: tuple[str, ...]) -> None:
    """Makes the runs without a result, if --data names MNIST, then draws the page and its picture.

    All runs take an hour on one core. Each result is saved at once; several processes may make different degrees.
    """
    torch.set_num_threads(1)
    store = stored(RESULTS / "results.json")
    if data is None:
        make_missing((), str, lambda: write_page(store, RESULTS))
        return
    try:
        task = load_task("mnist", data)
    except TaskError as error:
        raise click.UsageError(str(error)) from None
    digits = Digits(task)

    def make(case: Case) -> str:
        store.add(case, found := measure(case, task, digits))
        return f"loss {found.loss:.3f}, accuracy {100 * found.accuracy:.1f} %, on 8 and 9 {100 * found.rare:.1f} %"

    def missing() -> Iterator[tuple[str, Case]]:
        degrees = [int(each) for each in slower] or [*reversed(SLOWER)]
        for case in wanted(degrees, lambda case: store[case].loss):
            if case not in store:
                yield str(case), case

    make_missing(missing(), make, lambda: write_page(store, RESULTS))


if __name__ == "__main__":
    main()
