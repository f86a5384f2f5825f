"""Experiments whose workers are simulated."""

from __future__ import annotations

import math

import numpy as np
from gem_worker.tasks import load_task

from benchmarks.paper.experiments import Experiment
from benchmarks.paper.runner import make
from benchmarks.paper.simulated import run

TINY = Experiment("digits", workers=5, steps=40, batch_size=8, setting="simulated", spread=1.0)


def test_an_experiment_may_be_simulated() -> None:
    result = make(TINY, None)
    assert (result.outcome, result.steps[-1], result.curves["samples"][-1]) == ("complete", 40, 5 * 40 * 8)
    assert result.curves["loss"][-1] < result.curves["loss"][0]
    assert result.test_accuracy is not None
    assert 0.1 < result.test_accuracy <= 1
    assert len(result.curves["version"]) == 20


def test_all_settings_reach_the_rule_and_the_order() -> None:
    changes = {
        "learning_rate": 0.01, "momentum": 0.5, "kappa": 0.5, "pi_max": 1.0, "seed": 1, "local_steps": 4, "rule": "downpour",
        "spread": 0.1, "batch_variation": 0.9, "rule_options": "against=0.5",
    }  # fmt: skip
    task = load_task("digits", None)
    usual = run(TINY, task).curves["loss"]
    for name, value in changes.items():
        changed = run(Experiment(**{**vars(TINY), name: value}), task).curves["loss"]
        assert not np.array_equal(changed, usual), name


def test_a_run_that_learns_nothing_ends_early_if_asked_to() -> None:
    task, slow = load_task("digits", None), Experiment(**{**vars(TINY), "learning_rate": 1e-6})
    assert run(slow, task).steps[-1] == 40
    assert run(slow, task, hopeless=0.5).steps[-1] == 20
    assert run(TINY, task, hopeless=0.5).steps[-1] == 40


def test_a_run_that_diverges_has_no_accuracy() -> None:
    result = run(Experiment(**{**vars(TINY), "learning_rate": 1000.0, "rule": "downpour"}), load_task("digits", None))
    assert (result.outcome, result.test_accuracy, result.test_loss) == ("diverged", None, None)
    assert math.isnan(result.curves["loss"][-1])
    assert len(result.curves["loss"]) == len(result.curves["seconds"])
