"""Which experiments make the paper's figures, and the keys that their results are kept under."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gem_worker.launcher.cli import main as gem_train

from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import EFFECTIVE_BATCH, FIGURES, Scale, experiments
from benchmarks.paper.runner import command

FULL = Scale()
NOT_THE_SAME: dict[str, Any] = {
    "task": "digits", "rule": "adaptive", "workers": 2, "steps": 5, "seed": 1, "learning_rate": 0.1, "momentum": 0.5,
    "kappa": 2.0, "snapshot": "paper", "batch_size": 32, "local_steps": 4, "rule_options": "a=1", "pi_max": 3.0,
    "step_seconds": 0.1, "setting": "staged", "slowdown": 10.0, "replacements": 3, "spread": 0.5, "batch_variation": 0.9,
    "turns": "random", "optimizer": "adamw", "reply_wait": 0.15,
}  # fmt: skip


def test_a_key_stays_what_it_was_or_results_of_days_would_be_run_again() -> None:
    assert Experiment("mnist", workers=30).key == "mnist-gem-30x937-seed0-21fa0f4b"


def test_a_key_differs_where_any_setting_does() -> None:
    assert NOT_THE_SAME.keys() == {field.name for field in fields(Experiment)}
    base = Experiment("mnist")
    keys = {replace(base, **{name: value}).key for name, value in NOT_THE_SAME.items()}
    assert len(keys | {base.key}) == len(NOT_THE_SAME) + 1


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


def test_the_command_lines_have_options_that_the_commands_know() -> None:
    for experiment in experiments(["1", "6", "8", "conventions"], FULL):
        assert unknown(experiment, gem_train) == []


def unknown(experiment: Experiment, target: Any) -> list[str]:
    """Flags of the experiment's command line that the command does not have."""
    known = {name for parameter in target.params for name in parameter.opts}
    arguments = command(experiment, Path("data"), Path("runs"), processes=1000)[3:]
    return [argument for argument in arguments if argument.partition("=")[0] not in known]
