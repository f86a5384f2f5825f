"""How the best learning rate of a rule is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from gem_worker.tasks import load_task

from benchmarks.many_workers import rivals
from benchmarks.paper.experiments import Experiment

TRIAL = rivals.first(rivals.RULES[0], 30)


def tuned(trial: Experiment, loss: Callable[[Experiment], float]) -> dict[Experiment, rivals.Outcome]:
    """What has been measured in the end, if losses are as given."""
    known: dict[Experiment, rivals.Outcome] = {}
    for one in rivals.wanted(trial, known):
        known[one] = rivals.Outcome(loss(one), 0.9)
    return known


@pytest.mark.parametrize(("best", "tried"), [(0.05, 5), (0.2, 5), (0.5, 6), (2.0, 7), (0.001, 7)])
def test_the_grid_grows_until_the_best_is_inside(best: float, tried: int) -> None:
    known = tuned(TRIAL, lambda one: abs(math.log(one.learning_rate / best)))
    rates = sorted({trial.learning_rate for trial in known})
    (found,) = rivals.best_known(known)
    assert len(rates) == tried
    assert rates[0] < found.learning_rate < rates[-1]
    assert abs(math.log(found.learning_rate / best)) <= math.log(10) / 2
    assert sum(trial.seed in rivals.SEEDS for trial in known) == len(rivals.SEEDS)


def test_settings_are_chosen_at_the_best_rate_and_reported_on_other_seeds() -> None:
    trial = rivals.first(next(setup for setup in rivals.RULES if setup.rule == "ringmaster"), 30)
    known = tuned(trial, lambda one: abs(math.log(one.learning_rate / 0.05)) - (one.rule_options == "threshold=120"))
    best = replace(trial, learning_rate=0.05, rule_options="threshold=120", seed=rivals.CHOICE_SEED)
    assert [each.rule_options for each in known if each.seed != rivals.CHOICE_SEED] == ["threshold=120"] * len(rivals.SEEDS)
    assert rivals.best_known(known) == [best]


@pytest.mark.parametrize("setup", rivals.RULES, ids=lambda setup: setup.label)
def test_every_rule_trains_in_the_simulation(setup: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rivals.GRADIENTS, 30, 4)
    outcome = rivals.measure(rivals.first(setup, 30), load_task("digits", None))  # type: ignore[arg-type]
    assert outcome.final_loss < 4.0
    assert 0 <= outcome.accuracy <= 1
