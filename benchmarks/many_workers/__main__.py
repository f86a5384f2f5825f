"""Makes the runs that have no result yet, then the page: `python -m benchmarks.many_workers --data DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gem_worker.tasks import load_task

from benchmarks.lib.runs import Wanted, study
from benchmarks.many_workers import check, rivals, runs
from benchmarks.many_workers.page import draw

RESULTS = Path(__file__).parents[2] / "docs/results/many-workers"


def plan(parts: Sequence[str], data: Path | None) -> Wanted:
    if data is None:
        return
    task = load_task("mnist", data)
    compared, made = check.stored(RESULTS), runs.stored(RESULTS)
    for service in check.SERVICES if "check" in parts else ():
        yield compared, service, partial(check.compare, service, task, data)
    for case in runs.order_cases() * ("order" in parts) + runs.number_cases() * ("number" in parts):
        yield made, case, partial(runs.measure, case, task)
    held, tuned = rivals.stored(RESULTS / "in-step.json"), rivals.stored(RESULTS / "rivals.json")
    for case in rivals.waiting_cases(rivals.WAIT) if "in-step" in parts else ():
        yield held, case, partial(rivals.measure, case, task)
    for trial in rivals.trials():
        for case in rivals.wanted(trial, tuned) if f"rivals-{rivals.workers_of(trial)}" in parts else ():
            yield tuned, case, partial(rivals.measure, case, task)


about = "Makes the runs without a result, if --data names MNIST, then the page. They take some hours."
main = study(about, ("check", "order", "number", "in-step", *(f"rivals-{n}" for n in rivals.GRADIENTS)), plan, draw, RESULTS)

if __name__ == "__main__":
    main()
