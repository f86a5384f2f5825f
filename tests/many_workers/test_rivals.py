"""How the best learning rate of a rule is found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from gem_worker.tasks import load_task

from benchmarks.many_workers import rivals
from benchmarks.paper.experiments import Experiment

TRIAL = rivals.first(rivals.RULES[0], 30)


class Lab:
    """Measures trials by a formula: the best rate is `best`."""

    def __init__(self, best: float) -> None:
        self.best = best
        self.known: dict[Experiment, rivals.Outcome] = {}

    def measure(self, trial: Experiment) -> rivals.Outcome:
        assert trial not in self.known
        self.known[trial] = rivals.Outcome(abs(math.log(trial.learning_rate / self.best)), 0.9)
        return self.known[trial]


@pytest.mark.parametrize(("best", "tried"), [(0.05, 5), (0.2, 5), (0.5, 6), (2.0, 7), (0.001, 7)])
def test_the_grid_grows_until_the_best_is_inside(best: float, tried: int) -> None:
    lab = Lab(best)
    found = rivals.tune(TRIAL, lab.known, lab.measure)
    rates = sorted({trial.learning_rate for trial in lab.known})
    assert len(rates) == tried
    assert rates[0] < found.learning_rate < rates[-1]
    assert abs(math.log(found.learning_rate / best)) <= math.log(10) / 2
    assert sum(trial.seed in rivals.SEEDS for trial in lab.known) == len(rivals.SEEDS)


def test_settings_are_chosen_at_the_best_rate_and_reported_on_other_seeds() -> None:
    lab = Lab(0.05)
    trial = rivals.first(next(setup for setup in rivals.RULES if setup.rule == "ringmaster"), 30)

    def measure(one: Experiment) -> rivals.Outcome:
        lab.known[one] = rivals.Outcome(abs(math.log(one.learning_rate / 0.05)) - (one.rule_options == "threshold=120"), 0.9)
        return lab.known[one]

    best = rivals.tune(trial, lab.known, measure)
    assert best == replace(trial, learning_rate=0.05, rule_options="threshold=120", seed=rivals.CHOICE_SEED)
    assert [each.rule_options for each in lab.known if each.seed != rivals.CHOICE_SEED] == ["threshold=120"] * len(rivals.SEEDS)
    assert rivals.best_known(lab.known) == [best]


def test_what_is_known_is_not_measured_again() -> None:
    lab = Lab(0.05)
    rivals.tune(TRIAL, lab.known, lab.measure)
    before = dict(lab.known)
    assert rivals.tune(TRIAL, lab.known, lab.measure) == replace(TRIAL, learning_rate=0.05)
    assert lab.known == before


@pytest.mark.parametrize("setup", rivals.RULES, ids=lambda setup: setup.label)
def test_every_rule_trains_in_the_simulation(setup: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.GRADIENTS, 30, 4)
    outcome = rivals.measure(rivals.first(setup, 30), load_task("digits", None))  # type: ignore[arg-type]
    assert outcome.final_loss < 4.0
    assert 0 <= outcome.accuracy <= 1
