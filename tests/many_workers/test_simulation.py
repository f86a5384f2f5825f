"""Many simulated workers train as the real service does, and their order matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_worker.tasks import load_task

from benchmarks.lib.launch import gem_train
from benchmarks.many_workers.order import recorded, simulated
from benchmarks.many_workers.runs import Run, experiment, measure, number_cases, order_cases, stored
from benchmarks.many_workers.simulation import train
from benchmarks.paper.experiments import Experiment

TASK = load_task("digits", None)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_case_is_a_setting_that_the_server_takes(seed: int) -> None:
    for case in {*order_cases(), *number_cases()}:
        replace(case, seed=seed).hyperparameters().require_valid()


def test_a_leap_is_the_largest_rise_above_what_the_loss_had_been_down_to() -> None:
    def run(*losses: float) -> Run:
        return Run(experiment(), [{"version": 100.0 * number, "loss": loss} for number, loss in enumerate(losses)])

    assert run(2.0, 1.0, 1.5, 0.5, 1.75, 0.25).leap == 1.25
    assert run(2.0, 1.0, 0.5).leap == 0
    assert run(2.0, float("nan")).leap == float("inf")


def test_a_run_that_diverged_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    rows = [{"version": 100.0, "loss": 2.0, "accuracy": 0.1}, {"version": 130.0, "loss": float("nan")}]
    stored(tmp_path).add(experiment(), Run(experiment(), rows))
    assert stored(tmp_path)[experiment()].leap == float("inf")


@pytest.fixture(scope="module")
def lockstep() -> Run:
    return measure(experiment(workers=40, steps=12, spread=0.05), TASK)


def test_a_case_gives_the_same_numbers_each_time(lockstep: Run) -> None:
    assert measure(lockstep.case, TASK).rows == lockstep.rows


def test_random_times_train_further_than_lockstep(lockstep: Run) -> None:
    at_random = measure(experiment(workers=40, steps=12, spread=1.0), TASK)
    assert at_random.accuracy > lockstep.accuracy + 0.2
    assert lockstep.column("staleness_sd")[6] < 15 < 30 < at_random.column("staleness_sd")[6]


def test_a_row_has_the_energies_of_its_round(lockstep: Run) -> None:
    for row in lockstep.rows[1:]:
        assert 0 < row["mean_moment"] < row["largest_moment"]
        assert row["moved"] > 0
        assert 0 <= row["still"] <= 1


def test_a_run_that_diverges_ends_with_a_loss_that_is_none() -> None:
    settings = Hyperparameters(rule="downpour", learning_rate=1000.0)
    rows = train(TASK, settings, simulated(Experiment("digits", workers=10, steps=20, spread=0.05)), 10, 10)
    assert not np.isfinite(rows[-1]["loss"])


def test_the_simulation_trains_as_the_service_did_in_the_same_order(tmp_path: Path) -> None:
    workers, steps = 30, 24
    folder = gem_train(replace(Hyperparameters(), shards="replicate", steps=steps, epochs=0), "digits", None, workers, tmp_path)
    real = folder.history()["loss"].reshape(6, -1).mean(axis=1)
    rows = train(TASK, Hyperparameters(), recorded(folder.commits), workers, workers * steps // 6)
    simulated_losses = np.array([row["loss"] for row in rows])
    # Both draw their own batches: 0.04 to 0.1 apart on average. In lockstep, or at random times, it is 0.3 to 0.7.
    assert np.abs(simulated_losses - real).mean() < 0.2
    assert simulated_losses[-1] < 0.5
