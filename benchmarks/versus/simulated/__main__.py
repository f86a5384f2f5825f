"""Makes the simulated runs that have no result yet, then the page: `python -m benchmarks.versus.simulated`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.lib.runs import study
from benchmarks.versus.simulated import plan
from benchmarks.versus.simulated.page import write_page
from benchmarks.versus.simulated.runs import make_and_keep, stored

RESULTS = Path(__file__).parents[3] / "docs/results/versus"


def missing(questions: Sequence[str], data: Path | None) -> Iterator[tuple[str, Callable[[], str]]]:
    store = stored(RESULTS / "simulated.json")
    for run in plan.runs(questions):
        if run not in store and (data is not None or run.model != "convnet"):
            yield str(run), partial(make_and_keep, run, data, store)


about = "Makes the runs without a result, then the page. All of them take about two hours on one core."
main = study(about, plan.QUESTIONS, missing, lambda: write_page(stored(RESULTS / "simulated.json"), RESULTS))

if __name__ == "__main__":
    main()
