"""Makes the runs that have no result yet, then the page: `python -m benchmarks.finals`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.finals import plan, real
from benchmarks.finals.figure import figure, number
from benchmarks.finals.page import write_page
from benchmarks.finals.runs import make, stored
from benchmarks.lib import wire
from benchmarks.lib.runs import Wanted, study
from benchmarks.lib.style import save

RESULTS = Path(__file__).parents[2] / "docs/results/versus"


def simulated(questions: Sequence[str], data: Path | None) -> Wanted:
    store = stored(RESULTS / "finals.json")
    for run in plan.runs(questions):
        if data or run.model != "convnet":
            yield store, run, partial(make, run, data)


def with_processes(questions: Sequence[str], data: Path | None) -> Wanted:
    """Those that this machine can make."""
    store = stored(RESULTS / "finals.json")
    for run in real.runs(store):
        if (data or run.model != "convnet") and (run.profile != "far" or wire.possible()):
            yield store, run, partial(real.make, run, data)


def draw(folder: Path) -> Path:
    store = stored(folder / "finals.json")
    save(figure(store), folder / "finals.png")
    save(number(store), folder / "number.png")
    return write_page(store, folder)


about = "Makes the runs without a result, then the page. They take hours."
main = study(about, plan.QUESTIONS, simulated, draw, RESULTS, with_processes)

if __name__ == "__main__":
    main()
