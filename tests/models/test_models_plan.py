"""Which runs compare the optimizers: the grids of learning rates, how they grow, and what follows from the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gem_api.process.options import expanded
from gem_worker.launcher.cli import main as gem_train
from gem_worker.tasks import load_task

from benchmarks.models.measure import command, variables
from benchmarks.models.plan import (
    SEEDS,
    STAGES,
    STEPS,
    Results,
    alone_cases,
    at_the_end,
    best,
    case,
    cases,
    first_grid,
    grid,
    kappas,
    missing,
    mnist_case,
    seeds,
)
from benchmarks.models.runs import METHODS, Outcome, Run, rate

CASE = case("gem-adamw", 16)
FIRST = first_grid(CASE)


def outcome(loss: float) -> Outcome:
    return Outcome("complete", loss, None, 1.0, 15.0, 0.1)


def bowl(lowest: float) -> Results:
    """Every run has a result; the loss is lowest at one place of the ladder."""
    return lambda run: outcome(2 + (run.place - lowest) ** 2)


def places(runs: list[Run]) -> list[int]:
    return [run.place for run in runs]


def test_the_ladder_of_rates() -> None:
    assert [rate(place) for place in range(-8, 1)] == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0]


def test_every_first_grid_has_four_rates_in_a_row() -> None:
    for each in [*cases(1), *cases(32), *alone_cases(), mnist_case("gem-adamw"), mnist_case("gem-sgd")]:
        first = first_grid(each)
        assert first == tuple(range(first[0], first[0] + 4)), each


def test_steps_are_whole_windows_of_every_method() -> None:
    for steps in STEPS.values():
        for method in METHODS.values():
            assert steps % method.local_steps == 0
            assert steps // method.local_steps >= 2


def test_a_grid_stays_if_its_best_rate_lies_within() -> None:
    assert places(grid(CASE, bowl(FIRST[1]))) == list(FIRST)
    found = best(CASE, bowl(FIRST[1]))
    assert found == replace(CASE, place=FIRST[1])
    assert not at_the_end(found, bowl(FIRST[1]))


@pytest.mark.parametrize(
    ("lowest", "expected"),
    [
        (FIRST[0], [FIRST[0] - 1, *FIRST]),
        (FIRST[3], [*FIRST, FIRST[3] + 1]),
        (FIRST[0] - 9, [FIRST[0] - 2, FIRST[0] - 1, *FIRST]),
        (FIRST[3] + 9, [*FIRST, FIRST[3] + 1, FIRST[3] + 2]),
    ],
)
def test_a_grid_grows_where_its_best_rate_is_at_an_end_but_not_for_ever(lowest: int, expected: list[int]) -> None:
    results = bowl(lowest)
    assert places(grid(CASE, results)) == expected
    found = best(CASE, results)
    assert found is not None
    assert at_the_end(found, results) == (lowest not in expected)


def test_a_grid_does_not_grow_before_it_is_measured() -> None:
    assert places(grid(CASE, lambda run: None)) == list(FIRST)
    only_one: Results = lambda run: outcome(1.0) if run.place == FIRST[0] else None  # noqa: E731
    assert places(grid(CASE, only_one)) == list(FIRST)
    assert best(CASE, only_one) is None


def test_a_diverged_rate_is_a_result_and_never_the_best() -> None:
    broken = Outcome("diverged", 0.1, None, 1.0, None, None)
    assert math.isinf(broken.loss)
    assert best(CASE, lambda run: broken) is None
    assert seeds(CASE, lambda run: broken) == []
    one_works: Results = lambda run: outcome(3.0) if run.place == FIRST[1] else broken  # noqa: E731
    assert best(CASE, one_works) == replace(CASE, place=FIRST[1])


def test_seeds_and_kappas_are_those_of_the_best_rate() -> None:
    results = bowl(FIRST[2])
    assert seeds(CASE, results) == [replace(CASE, place=FIRST[2], seed=seed) for seed in SEEDS]
    assert {(run.place, run.seed, run.kappa) for run in kappas(CASE, results)} == {
        (FIRST[2], seed, kappa) for seed in SEEDS for kappa in (1.0, 2.0, 4.0)
    }


def measuring(results: dict[Run, Outcome], lose: Callable[[Run], bool] = lambda run: False) -> list[Run]:
    """Makes all runs of all stages, without training; returns them in their order."""
    made = []
    for _, run in missing(list(STAGES), results.get):
        made.append(run)
        if not lose(run):
            results[run] = outcome(2 + (run.place - METHODS[run.method].rates[1]) ** 2 + run.seed / 100)
    return made


def test_all_stages_make_each_run_once_and_then_nothing_is_missing() -> None:
    results: dict[Run, Outcome] = {}
    made = measuring(results)
    assert len(set(made)) == len(made)
    assert list(missing(list(STAGES), results.get)) == []
    for stage in STAGES.values():
        assert all(run in results for run in stage(results.get))
    assert {run.workers for run in made if run.task == "characters"} == set(STEPS)
    assert made[0].workers == 16, "the most valuable stage comes first"


def test_a_run_without_a_result_is_tried_once_and_holds_up_nothing_else() -> None:
    results: dict[Run, Outcome] = {}
    lost = replace(CASE, place=FIRST[0])
    made = measuring(results, lose=lambda run: run == lost)
    assert made.count(lost) >= 1
    assert best(CASE, results.get) is None
    assert best(case("downpour-adamw", 16), results.get) is not None
    assert [run for _, run in missing(["rates-16"], results.get)] == [lost]


@pytest.mark.parametrize("run", [*cases(4), mnist_case("gem-adamw"), mnist_case("gem-sgd")], ids=lambda run: run.name)
def test_gem_train_takes_the_command_of_every_method(run: Run) -> None:
    line = command(run, Path("/data"), Path("runs"))
    context = gem_train.make_context("gem-train", line[3:], resilient_parsing=False)
    (given, _), method = expanded(context), METHODS[run.method]
    assert (given["rule"], given["optimizer"], given["workers"]) == (method.rule, method.optimizer, run.workers)
    assert given["steps"] * given["local_steps"] == run.steps
    assert given["kappa"] == (1.0 if run.kappa is None else run.kappa)
    assert given["shards"] == "replicate", "partition would give each worker fewer samples"
    if method.own:
        assert variables(run).items() >= {"CHARACTERS_LEARNING_RATE": str(run.rate), "CHARACTERS_WARMUP_STEPS": "10"}.items()
    else:
        assert not any(name.startswith("CHARACTERS_") for name in variables(run))
        assert (given["learning_rate"], given["warmup_versions"]) == (run.rate, 10 * run.workers)
    if run.task == "mnist":
        assert given["data"] == Path("/data")
    else:
        assert hasattr(load_task(given["task"], None), "optimizer") == method.own
