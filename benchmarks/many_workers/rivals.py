"""Every rule at its own best learning rate, so that the comparison of rules is a fair one."""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click
from gem_worker.tasks import Task, load_task

from benchmarks.lib import page as markdown
from benchmarks.lib.results import Store, plain
from benchmarks.many_workers.runs import SEEDS
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import AT_RANDOM, BASIC_RULES, LOCKSTEP, RULES, RuleSetup
from benchmarks.paper.simulated import run
from benchmarks.paper.statistics import NOT_LEARNED

RATES = (0.005, 0.015, 0.05, 0.15, 0.5)
STEP = 10**0.5  # between rates beyond these
LEAST, MOST = 5e-4, 20.0
GRADIENTS = {30: 400, 100: 120}  # of each worker, by their number: 12,000 in all
ROWS = 10  # of a run; the loss of the last one is the final loss
HOPELESS = 0.4  # of a run, after which it ends if nothing has been learned


@dataclass(frozen=True)
class Outcome:
    """What is kept of a run: the mean training loss of its last tenth, infinite if it diverged, and the test accuracy."""

    final_loss: float
    accuracy: float


Outcomes = Mapping[Experiment, Outcome]
Measure = Callable[[Experiment], Outcome]


def first(setup: RuleSetup, workers: int, spread: float = AT_RANDOM) -> Experiment:
    """The trial of a rule at the paper's rate."""
    return Experiment(
        "mnist", setup.rule, workers, GRADIENTS[workers], local_steps=setup.local_steps, rule_options=setup.options(workers),
        spread=spread, setting="simulated",
    )  # fmt: skip


def label(trial: Experiment) -> str:
    """The name of its rule."""
    return next(each.label for each in RULES if (each.rule, each.local_steps) == (trial.rule, trial.local_steps))


def trials() -> list[Experiment]:
    """What is tuned: every rule at times that vary, and the paper's three in lockstep too."""
    basic = [setup for setup in RULES if setup.rule in BASIC_RULES and setup.local_steps == 1]
    orders = [(LOCKSTEP, basic), (AT_RANDOM, list(RULES))]
    return [first(setup, workers, spread) for workers in GRADIENTS for spread, setups in orders for setup in setups]


def measure(trial: Experiment, task: Task) -> Outcome:
    """Makes a run. All rules see as many gradients."""
    result = run(trial, task, rows=ROWS, hopeless=HOPELESS)
    if result.test_accuracy is None:
        return Outcome(math.inf, math.nan)
    return Outcome(round(float(result.curves["loss"][-1]), 4), round(result.test_accuracy, 4))


def tune(trial: Experiment, known: Outcomes, measure: Measure) -> Experiment:
    """Finds the best rate, by the training loss of one seed: test data have no say. The grid grows while the best is at an
    end; then the other seeds are run at the best.

    Args:
        trial: The rule, at any rate.
        known: What has been measured already; `measure` adds to it.
        measure: Makes a run.
    """

    def loss(rate: float) -> float:
        one = replace(trial, learning_rate=rate, seed=SEEDS[0])
        return (known.get(one) or measure(one)).final_loss

    rates = sorted(RATES)
    best = min(rates, key=loss)
    while (best == rates[0] and best / STEP > LEAST) or (best == rates[-1] and best * STEP < MOST):
        rates = sorted([*rates, float(f"{best / STEP if best == rates[0] else best * STEP:.2g}")])
        best = min(rates, key=loss)
    for seed in SEEDS[1:]:
        one = replace(trial, learning_rate=best, seed=seed)
        if one not in known:
            measure(one)
    return replace(trial, learning_rate=best)


def tune_all(data: Path, known: Store[Experiment, Outcome], processes: int) -> str:
    """Tunes every rule, for each number of workers, with MNIST in the folder `data`.

    Args:
        data: Folder of MNIST's four files.
        known: What has been measured already. New outcomes are added and saved.
        processes: How many runs are made at the same time, each in a process of its own.
    """
    alone = threading.Lock()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) as pool, ThreadPoolExecutor(processes) as threads:

        def measured(trial: Experiment) -> Outcome:
            outcome = pool.submit(_measure_mnist, trial, data).result()
            with alone:
                known.add(trial, outcome)
                click.echo(f"  {trial}: {outcome}")
            return outcome

        try:
            for tuning in [threads.submit(tune, trial, known, measured) for trial in trials()]:
                tuning.result()
        except BaseException:  # Ctrl-C too: nobody waits for the runs that are under way
            threads.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise
    return f"{len(known)} runs"


def _measure_mnist(trial: Experiment, data: Path) -> Outcome:
    return measure(trial, _mnist(data))


@cache
def _mnist(data: Path) -> Task:
    return load_task("mnist", data)


def best_known(known: Outcomes) -> list[Experiment]:
    """The best trial of each rule, number of workers and order that has been measured with all seeds."""
    groups: dict[tuple[str, int, float], list[Experiment]] = {}
    for trial in known:
        if all(replace(trial, seed=seed) in known for seed in SEEDS):
            groups.setdefault((label(trial), trial.workers, trial.spread), []).append(replace(trial, seed=SEEDS[0]))
    return [min(trials, key=lambda trial: known[trial].final_loss) for trials in groups.values()]


def progress(known: Outcomes) -> str:
    """A sentence about the rows that the table still lacks, with a space at its end; empty if it has all."""
    missing = len(trials()) - len(best_known(known))
    return f"{missing} of {len(trials())} rows are still to be run. " if missing else ""


def table(known: Outcomes) -> str:
    """The page's table: every rule at its best rate, and at the paper's."""
    rows: list[list[object]] = []
    for best in sorted(best_known(known), key=lambda trial: (trial.workers, trial.spread, known[trial].final_loss)):
        tried = sorted(each.learning_rate for each in known if replace(each, learning_rate=0) == replace(best, learning_rate=0))
        order = "lockstep" if best.spread == LOCKSTEP else "random"
        papers = replace(best, learning_rate=0.05)
        rows.append([
            best.workers, order, label(best), f"{len(tried)}, {tried[0]:g} to {tried[-1]:g}",
            f"{best.learning_rate:g}", _accuracies(known, best), _accuracies(known, papers),
        ])  # fmt: skip
    return markdown.table(["Workers", "Order", "Rule", "Rates tried", "Best", "Test accuracy", "at the paper's 0.05"], rows)


def _accuracies(known: Outcomes, trial: Experiment) -> str:
    found = [known[one] for seed in SEEDS if (one := replace(trial, seed=seed)) in known]
    if not found:
        return "–"
    return ", ".join("failed" if each.final_loss > NOT_LEARNED else f"{100 * each.accuracy:.2f} %" for each in found)


def stored(path: Path) -> Store[Experiment, Outcome]:
    """The stored outcomes; what is not finite is null."""

    def outcome(trial: Experiment, row: dict[str, float | None]) -> Outcome:
        loss, accuracy = row["final_loss"], row["accuracy"]
        return Outcome(math.inf if loss is None else loss, math.nan if accuracy is None else accuracy)

    def encode(found: Outcome) -> dict[str, float | None]:
        return {name: plain(value) for name, value in vars(found).items()}

    return Store(path, "experiment", Experiment, encode, outcome)
