"""How the best learning rate of a rule is found."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from gem_worker.tasks import load_task

from benchmarks.many_workers import rivals
from benchmarks.many_workers.rivals import (
    CHOICE_SEED,
    RATES,
    RULES,
    SEEDS,
    Outcome,
    best_known,
    first,
    measure,
    progress,
    stored,
    table,
    trials,
    tune,
)
from benchmarks.paper.experiments import Experiment

TRIAL = first(RULES[0], 30)


class Lab:
    """Measures trials by a formula: the best rate is `best`."""

    def __init__(self, best: float) -> None:
        self.best = best
        self.known: dict[Experiment, Outcome] = {}

    def measure(self, trial: Experiment) -> Outcome:
        assert trial not in self.known
        self.known[trial] = Outcome(abs(math.log(trial.learning_rate / self.best)), 0.9)
        return self.known[trial]


@pytest.mark.parametrize(("best", "tried"), [(0.05, 5), (0.2, 5), (0.5, 6), (2.0, 7), (0.001, 7)])
def test_the_grid_grows_until_the_best_is_inside(best: float, tried: int) -> None:
    lab = Lab(best)
    found = tune(TRIAL, lab.known, lab.measure)
    rates = sorted({trial.learning_rate for trial in lab.known})
    assert len(rates) == tried
    assert rates[0] < found.learning_rate < rates[-1]
    assert abs(math.log(found.learning_rate / best)) <= math.log(10) / 2
    assert sum(trial.seed in SEEDS for trial in lab.known) == len(SEEDS)


def test_settings_are_chosen_at_the_best_rate_and_reported_on_other_seeds() -> None:
    lab = Lab(0.05)
    trial = first(next(setup for setup in RULES if setup.rule == "ringmaster"), 30)

    def measure(one: Experiment) -> Outcome:
        lab.known[one] = Outcome(abs(math.log(one.learning_rate / 0.05)) - (one.rule_options == "threshold=120"), 0.9)
        return lab.known[one]

    best = tune(trial, lab.known, measure)
    assert best == replace(trial, learning_rate=0.05, rule_options="threshold=120", seed=CHOICE_SEED)
    assert [each.rule_options for each in lab.known if each.seed != CHOICE_SEED] == ["threshold=120"] * len(SEEDS)
    assert best_known(lab.known) == [best]


def test_what_is_known_is_not_measured_again() -> None:
    lab = Lab(0.05)
    tune(TRIAL, lab.known, lab.measure)
    before = dict(lab.known)
    assert tune(TRIAL, lab.known, lab.measure) == replace(TRIAL, learning_rate=0.05)
    assert lab.known == before


def test_the_table_has_the_best_of_every_rule(tmp_path: Path) -> None:
    lab = Lab(0.15)
    tune(TRIAL, lab.known, lab.measure)
    lab.known[replace(TRIAL, learning_rate=max(RATES))] = Outcome(math.inf, math.nan)
    for trial, outcome in lab.known.items():
        stored(tmp_path / "rivals.json").add(trial, outcome)
    known = stored(tmp_path / "rivals.json")
    assert best_known(known) == [replace(TRIAL, learning_rate=0.15)]
    assert (
        table(known).splitlines()[2] == "| 30 | random | GEM | 5, 0.005 to 0.5 | 0.15 | 90.00 %, 90.00 %, 90.00 % | 90.00 % |"
    )
    assert progress(known) == f"{len(trials()) - 1} of {len(trials())} rows are still to be completed. "


@pytest.mark.parametrize("setup", RULES, ids=lambda setup: setup.label)
def test_every_rule_trains_in_the_simulation(setup: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.GRADIENTS, 30, 4)
    outcome = measure(first(setup, 30), load_task("digits", None))  # type: ignore[arg-type]
    assert outcome.final_loss < 4.0
    assert 0 <= outcome.accuracy <= 1
