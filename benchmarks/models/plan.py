"""Which runs are wanted, in the order of their value. What later stages want depends on earlier results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.models.runs import METHODS, Outcome, Run

# Steps of each worker by number of workers. Multiples of DiLoCo's 32 local steps.
STEPS = {1: 160, 4: 160, 16: 96, 32: 64}
WIDTHS = (16, 4, 32, 1)  # in the order of measuring
SHARED = "downpour-adamw"  # with one worker it is AdamW itself
SEEDS = (0, 1, 2)
KAPPAS = (1.0, 2.0, 4.0)
MATCHED = tuple(name for name, method in METHODS.items() if method.kappa is not None)
MNIST_WORKERS, MNIST_STEPS, MNIST_BATCH = 30, 300, 64
ON_SERVER = ("gem-adamw", "gem-sgd")  # GEM around an optimizer on the server: compared on MNIST, too
MNIST_RATES = {"gem-adamw": (-8, -7, -6, -5), "gem-sgd": (-4, -3, -2, -1)}
_MAX_EXTENSION = 2  # rates added beyond each end of a grid

Results = Callable[[Run], Outcome | None]
Stage = Callable[[Results], list[Run]]


def first_grid(case: Run) -> tuple[int, ...]:
    """The rates that a case is tried at, unless the best is one of the outer two."""
    return MNIST_RATES[case.method] if case.task == "mnist" else METHODS[case.method].rates


def grid(case: Run, results: Results) -> list[Run]:
    """The case at each rate, lowest first. If the best so far is at an end, the grid goes on there by one rate, at most
    `_MAX_EXTENSION` times."""
    places = list(first_grid(case))
    lowest, highest = places[0] - _MAX_EXTENSION, places[-1] + _MAX_EXTENSION
    while True:
        best = _best_of([replace(case, place=place) for place in places], results)
        if best is None:
            break
        if best.place == places[0] > lowest:
            places.insert(0, places[0] - 1)
        elif best.place == places[-1] < highest:
            places.append(places[-1] + 1)
        else:
            break
    return [replace(case, place=place) for place in places]


def best(case: Run, results: Results) -> Run | None:
    """The run with the lowest loss of the case's grid; None until all of its rates are measured, or if all diverged."""
    return _best_of(grid(case, results), results)


def at_the_end(run: Run, results: Results) -> bool:
    """Whether the best run is still at an end of its grid, so that a rate beyond might be better."""
    places = [each.place for each in grid(run, results)]
    return run.place in (places[0], places[-1])


def _best_of(runs: list[Run], results: Results) -> Run | None:
    losses = {run: outcome.loss for run in runs if (outcome := results(run)) is not None}
    if len(losses) < len(runs):
        return None
    found = min(runs, key=losses.__getitem__)
    return found if losses[found] < float("inf") else None


def case(method: str, workers: int, steps: int | None = None) -> Run:
    """A method with a number of workers, at the first seed. Its learning rate stands for all."""
    return Run(method, workers, steps or STEPS[workers], METHODS[method].rates[0], METHODS[method].kappa)


def mnist_case(method: str) -> Run:
    return Run(
        method, MNIST_WORKERS, MNIST_STEPS, MNIST_RATES[method][0], METHODS[method].kappa, task="mnist", batch_size=MNIST_BATCH
    )


def cases(workers: int) -> list[Run]:
    return [case(method, workers) for method in METHODS]


def alone_cases() -> list[Run]:
    """AdamW alone, for as many steps as a worker has, or for as many samples as all workers have."""
    lengths = set(STEPS.values()) | {workers * steps for workers, steps in STEPS.items()}
    return [case(SHARED, 1, steps) for steps in sorted(lengths)]


def mnist_cases() -> list[Run]:
    return [mnist_case(method) for method in ON_SERVER]


def seeds(case_: Run, results: Results) -> list[Run]:
    """The case at its best rate, under each seed; empty until the best rate is known."""
    found = best(case_, results)
    return [replace(found, seed=seed) for seed in SEEDS] if found else []


def kappas(case_: Run, results: Results) -> list[Run]:
    """The case at its best rate under each κ, one seed after the other; empty until the best rate is known."""
    return [replace(run, kappa=kappa) for run in seeds(case_, results) for kappa in KAPPAS]


def matched_cases() -> list[Run]:
    """The methods that have a κ, at each number of workers above 1."""
    return [case(method, workers) for workers in WIDTHS if workers > 1 for method in MATCHED]


def _grids(of: list[Run]) -> Stage:
    return lambda results: [run for each in of for run in grid(each, results)]


def _seeds(of: list[Run]) -> Stage:
    return lambda results: [run for each in of for run in seeds(each, results)]


def _kappas(of: list[Run], only: tuple[int, ...]) -> Stage:
    return lambda results: [run for each in of for run in kappas(each, results) if run.seed in only]


STAGES: dict[str, Stage] = {
    **{f"rates-{workers}": _grids(cases(workers)) for workers in WIDTHS},
    "alone": _grids(alone_cases()),
    **{f"seeds-{workers}": _seeds(cases(workers)) for workers in WIDTHS},
    "seeds-alone": _seeds(alone_cases()),
    "kappa": _kappas(matched_cases(), SEEDS[:1]),
    "mnist": _grids(mnist_cases()),
    "seeds-mnist": _seeds(mnist_cases()),
    "seeds-kappa": _kappas([case(name, WIDTHS[0]) for name in ON_SERVER], SEEDS[1:]),  # one width tells the noise
}


def missing(names: list[str], results: Results) -> Iterator[tuple[str, Run]]:
    """The runs that the stages want and that have no result, one at a time: the next is chosen by the results so far."""
    for name in names:
        tried: set[Run] = set()
        while (
            run := next((each for each in STAGES[name](results) if each not in tried and results(each) is None), None)
        ) is not None:
            tried.add(run)
            yield name, run
