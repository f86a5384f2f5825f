"""Makes the runs that have no result yet, then the page: `python -m benchmarks.many_workers --data DIR`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from gem_worker.tasks import load_task

from benchmarks.lib.runs import study
from benchmarks.many_workers import check, rivals, runs
from benchmarks.many_workers.page import write_page

RESULTS = Path(__file__).parents[2] / "docs/results/many-workers"


def missing(parts: Sequence[str], data: Path | None) -> Iterator[tuple[str, Callable[[], str]]]:
    if data is None:
        return
    task = load_task("mnist", data)
    if "check" in parts:
        compared = RESULTS / "check.json"
        for workers in set(check.WORKERS) - {each.workers for each in check.load(compared)}:
            yield f"gem-train with {workers} workers, then simulated", partial(check.compare, workers, task, data, compared)
    store = runs.stored(RESULTS / "runs.json")
    for case in runs.order_cases() * ("order" in parts) + runs.number_cases() * ("number" in parts):
        if case not in store:
            yield str(case), partial(runs.make_and_keep, case, task, store)
    held = rivals.stored(RESULTS / "in-step.json")
    for case in rivals.waiting_cases(rivals.WAIT) if "in-step" in parts else ():
        if case not in held:
            yield str(case), partial(rivals.make_and_keep, case, task, held)
    tuned = rivals.stored(RESULTS / "rivals.json")
    for trial in rivals.trials():
        if f"rivals-{(workers := rivals.workers_of(trial))}" in parts:
            name = f"{rivals.label(trial)}, {workers} workers, spread {trial.spread:g}"
            yield name, partial(rivals.tune_and_keep, trial, task, tuned)


def draw() -> Path:
    tuned, held = (rivals.stored(RESULTS / f"{name}.json") for name in ("rivals", "in-step"))
    return write_page(runs.stored(RESULTS / "runs.json"), check.load(RESULTS / "check.json"), tuned, held, RESULTS)


about = "Makes the runs without a result, if --data names MNIST, then the page. They take some hours."
main = study(about, ("check", "order", "number", "in-step", *(f"rivals-{n}" for n in rivals.GRADIENTS)), missing, draw)

if __name__ == "__main__":
    main()
