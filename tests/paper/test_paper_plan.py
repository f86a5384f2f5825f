"""Which experiments make the paper's figures."""

from __future__ import annotations

from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import EFFECTIVE_BATCH, FIGURES, Scale

FULL = Scale()


def test_the_workers_of_fig_4_process_the_same_samples_in_the_same_simulated_time_a_sample() -> None:
    runs = [group.first for group in FIGURES["4"](FULL)]
    assert [run.workers for run in runs] == [1, 2, 4, 8, 16]
    assert {run.workers * run.batch_size for run in runs} == {EFFECTIVE_BATCH}
    assert {round(run.step_seconds / run.batch_size, 12) for run in runs} == {FULL.batch_seconds / EFFECTIVE_BATCH}


def test_the_sequential_baseline_of_fig_5_sees_as_much_data_as_all_workers() -> None:
    workers, baseline = (group.first for group in FIGURES["5"](FULL))
    assert workers.gradients * workers.batch_size == baseline.gradients * baseline.batch_size
    assert (baseline.setting, baseline.workers) == ("sequential", 1)


def test_a_rule_with_local_steps_makes_fewer_commits_of_the_same_gradients() -> None:
    each = Experiment("mnist", steps=937, local_steps=4)
    assert (each.gradients, each.commits_each) == (937, 234)
