"""Every rule at its own best learning rate and settings, so that the comparison of rules is a fair one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from gem_worker.tasks import Task

from benchmarks.lib import page as markdown
from benchmarks.lib.results import Store, finite, restored
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import AT_RANDOM, BASIC_RULES, LOCKSTEP
from benchmarks.paper.simulated import run
from benchmarks.paper.statistics import NOT_LEARNED

CHOICE_SEED, SEEDS = 0, (1, 2, 3)  # rates and settings are chosen on the first, and reported on the others
WAIT, WAITING_SEEDS = 0.15, (0, 1, 2)  # of the runs whose replies are held
BATCH = 64  # of each worker
SYNCHRONOUS = "synchronous, Nesterov's momentum"  # one worker, whose batch is that of all
RATES = (0.005, 0.015, 0.05, 0.15, 0.5)
STEP = 10**0.5  # between rates beyond these
LEAST, MOST = 5e-4, 20.0
GRADIENTS = {30: 400, 100: 120}  # of each worker, by their number: 12,000 in all
ROWS = 10  # of a run; the loss of the last one is the final loss
HOPELESS = 0.4  # of a run, after which it ends if nothing has been learned
# Settings of the rules' own, by the number of workers, that are tried at the best rate besides those of `RULES`.
SETTINGS: Mapping[str, Callable[[int], list[str]]] = {
    "aeasgd": lambda n: [f"alpha={share / n:.4f}" for share in (0.3, 2.7)],
    "dcasgd": lambda n: ["compensation=0.4", "compensation=2 mean_square=0.95"],
    "fedasync": lambda n: ["mixing=0.3", "mixing=0.9"],
    "fedbuff": lambda n: ["buffer_size=3", f"buffer_size={n}"],
    "ringmaster": lambda n: [f"threshold={n}", f"threshold={4 * n}"],
    "diloco": lambda n: [f"delay={n} outer_rate={rate}" for rate in (0.35, 1.4)],
}


@dataclass(frozen=True)
class RuleSetup:
    """A rule to be tuned; its first `options` depend on the number of workers."""

    label: str
    rule: str
    local_steps: int = 1
    options: Callable[[int], str] = lambda n: ""


# Each rule has the settings of its own paper, if that names any: 0.9/n for AEASGD, momentum delayed by a round for DiLoCo.
# Ringmaster's threshold is well above the usual staleness n − 1, so that it discards mostly commits of stragglers.
RULES = (
    RuleSetup("GEM", "gem"),
    RuleSetup("GEM, 4 local steps", "gem", 4),
    RuleSetup("DOWNPOUR", "downpour"),
    RuleSetup("adaptive staleness", "adaptive"),
    RuleSetup("AGN, 4 local steps", "agn", 4),
    RuleSetup("AEASGD, 4 local steps", "aeasgd", 4, lambda n: f"alpha={0.9 / n:.4f}"),
    RuleSetup("DC-ASGD", "dcasgd"),
    RuleSetup("FedAsync, 4 local steps", "fedasync", 4),
    RuleSetup("FedBuff, 4 local steps", "fedbuff", 4, lambda n: f"buffer_size={min(10, n)}"),
    RuleSetup("Ringmaster", "ringmaster", options=lambda n: f"threshold={max(16, 2 * n)}"),
    RuleSetup("DANA", "dana"),
    RuleSetup("Rescaled ASGD", "rescaled"),
    RuleSetup("DiLoCo, 4 local steps", "diloco", 4, lambda n: f"delay={n}"),
)


@dataclass(frozen=True)
class Outcome:
    """What is kept of a run: the mean training loss of its last tenth, infinite if it diverged, and the test accuracy."""

    final_loss: float
    accuracy: float


Outcomes = Mapping[Experiment, Outcome]


def first(setup: RuleSetup, workers: int, spread: float = AT_RANDOM) -> Experiment:
    """The trial of a rule at the paper's rate."""
    return Experiment(
        "mnist", setup.rule, workers, GRADIENTS[workers], local_steps=setup.local_steps, rule_options=setup.options(workers),
        spread=spread, setting="simulated",
    )  # fmt: skip


def waiting_cases(wait: float) -> list[Experiment]:
    """The paper's rule in lockstep, with replies that are held; with a wait of 0 those of the rivals at the paper's rate."""
    return [replace(first(RULES[0], n, LOCKSTEP), seed=seed, reply_wait=wait) for seed in WAITING_SEEDS for n in GRADIENTS]


def synchronous(workers: int) -> Experiment:
    """The trial that all others are beside: every step has the mean gradient of all workers, which wait for each other."""
    return Experiment("mnist", "dana", 1, GRADIENTS[workers], batch_size=BATCH * workers, spread=LOCKSTEP, setting="simulated")


def workers_of(trial: Experiment) -> int:
    """How many workers it has, or stands for."""
    return trial.workers * trial.batch_size // BATCH


def label(trial: Experiment) -> str:
    """The name of its rule."""
    if trial.batch_size > BATCH:
        return SYNCHRONOUS
    return next(each.label for each in RULES if (each.rule, each.local_steps) == (trial.rule, trial.local_steps))


def trials() -> list[Experiment]:
    """What is tuned: every rule at times that vary; the paper's three, DANA and the synchronous run in lockstep too."""
    equal = [setup for setup in RULES if setup.rule in (*BASIC_RULES, "dana") and setup.local_steps == 1]
    orders = [(LOCKSTEP, equal), (AT_RANDOM, list(RULES))]
    rules = [first(setup, workers, spread) for workers in GRADIENTS for spread, setups in orders for setup in setups]
    return [*rules, *map(synchronous, GRADIENTS)]


def measure(trial: Experiment, task: Task) -> Outcome:
    """Makes a run. All rules see as many gradients."""
    result = run(trial, task, rows=ROWS, hopeless=HOPELESS)
    if result.test_accuracy is None:
        return Outcome(math.inf, math.nan)
    return Outcome(round(float(result.curves["loss"][-1]), 4), round(result.test_accuracy, 4))


def wanted(trial: Experiment, known: Outcomes) -> Iterator[Experiment]:
    """The runs that find the best rate, then the best settings at it, by the training loss of one seed: test data have no say.
    The grid of rates grows while the best is at an end. The best is then run with the other seeds.

    Args:
        trial: The rule, at any rate.
        known: The results of what was wanted before.
    """

    def loss(one: Experiment) -> float:
        return known[one].final_loss

    rates, grows = list(RATES), True
    while grows:
        tried = [replace(trial, learning_rate=rate, seed=CHOICE_SEED) for rate in rates]
        yield from tried
        found = min(tried, key=loss)
        lower, higher = (float(f"{rate:.2g}") for rate in (rates[0] / STEP, rates[-1] * STEP))
        if grows := found.learning_rate == rates[0] and rates[0] / STEP > LEAST:
            rates.insert(0, lower)
        elif grows := found.learning_rate == rates[-1] and rates[-1] * STEP < MOST:
            rates.append(higher)
    others = SETTINGS[trial.rule](trial.workers) if trial.rule in SETTINGS else []
    settings = [found, *(replace(found, rule_options=each) for each in others)]
    yield from settings
    best = min(settings, key=loss)
    yield from (replace(best, seed=seed) for seed in SEEDS)


def best_known(known: Outcomes) -> list[Experiment]:
    """The best trial of each rule, number of workers and order, by the seed that chooses, if others have been measured."""
    groups: dict[tuple[str, int, float], list[Experiment]] = {}
    for trial in known:
        if trial.seed == CHOICE_SEED:
            groups.setdefault((label(trial), workers_of(trial), trial.spread), []).append(trial)
    best = [min(trials, key=lambda trial: known[trial].final_loss) for trials in groups.values()]
    return [trial for trial in best if _reported(known, trial)]


def progress(known: Outcomes) -> str:
    """A sentence about the rows that the table still lacks, with a space at its end; empty if it has all."""
    missing = len(trials()) - sum(len(_reported(known, best)) == len(SEEDS) for best in best_known(known))
    return f"{missing} of {len(trials())} rows are still to be completed. " if missing else ""


def table(known: Outcomes) -> str:
    """The page's table: every rule at its best rate and settings, by the number of workers and their order."""
    best = {(label(trial), workers_of(trial), trial.spread): trial for trial in best_known(known)}
    places = list(product(GRADIENTS, (LOCKSTEP, AT_RANDOM)))
    rows = []
    for name in (*(each.label for each in RULES), SYNCHRONOUS):
        found = [best.get((name, *place)) for place in places]
        if any(found):
            rows.append([name, *(_cell(known, trial) if trial else "" for trial in found)])
    heads = [f"{workers}, {'lockstep' if spread == LOCKSTEP else 'random times'}" for workers, spread in places]
    return markdown.table(["Rule", *heads], rows)


def _cell(known: Outcomes, best: Experiment) -> str:
    """Accuracies, the best rate, and marks for a rate at the end of the grid and for failure at the paper's rate."""
    same = [each for each in known if each.seed == CHOICE_SEED and _alike(each) == _alike(best)]
    rates = {each.learning_rate for each in same}
    at_an_end = best.learning_rate in (min(rates), max(rates))
    fails = any(known[each].final_loss > NOT_LEARNED for each in same if each.learning_rate == 0.05)
    found = _reported(known, best)
    learned = [100 * each.accuracy for each in found if each.final_loss <= NOT_LEARNED]
    failed = f", {len(found) - len(learned)} failed" * (len(learned) < len(found))
    mark = "*" * at_an_end + "†" * fails
    return f"{np.mean(learned):.1f} ({min(learned):.1f}–{max(learned):.1f}{failed}), {best.learning_rate:g}{mark}"


def waiting_table(held: Outcomes, at_once: Outcomes) -> str:
    """Test accuracies with replies at once, and with those that are held."""
    lines = []
    for workers in GRADIENTS:
        cells = []
        for known, wait in ((at_once, 0.0), (held, WAIT)):
            made = [100 * known[each].accuracy for each in waiting_cases(wait) if each.workers == workers and each in known]
            cells.append(f"{np.mean(made):.2f} ({min(made):.2f}–{max(made):.2f})" if made else "–")
        lines.append(f"- {workers} workers: {cells[0]} if replies go out at once, {cells[1]} if held.")
    return "\n".join(lines)


def _alike(trial: Experiment) -> Experiment:
    """The same for all rates and settings of a row."""
    return replace(trial, learning_rate=0.0, rule_options="")


def _reported(known: Outcomes, best: Experiment) -> list[Outcome]:
    return [known[one] for seed in SEEDS if (one := replace(best, seed=seed)) in known]


def stored(path: Path) -> Store[Experiment, Outcome]:
    """The stored outcomes; what is not finite is null."""
    return Store(path, "experiment", Experiment, finite, lambda trial, row: Outcome(**restored(row, final_loss=math.inf)))
