"""The optimizer that the first worker brings: adopted as a whole, or not at all."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gem_api.errors import InvalidRequest, Overloaded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Group, Layout
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.schedule import Schedule
from kit.core import SMALL, commit, make_core

HUGE = Layout.of({"w": (1_000_000,)})
ADAMW = OptimizerChoice("adamw", "beta2=0.9", 0.01, 0.1)


@pytest.mark.parametrize(
    ("first", "second"), [(ADAMW, None), (None, OptimizerChoice("worker")), (ADAMW, OptimizerChoice("lion"))]
)
def test_a_registration_that_fails_leaves_the_settings_of_the_worker_before(
    first: OptimizerChoice | None, second: OptimizerChoice | None
) -> None:
    """The same name registers again, before θ has a value, and there is no room for its model."""
    core = make_core(memory_limit=200_000)
    lease = core.register("ann", SMALL, 0.0, choice=first).lease_id
    settings, rule = core.settings, core.rule
    with pytest.raises(Overloaded):
        core.register("ann", HUGE, 0.0, choice=second)
    assert (core.settings, core.rule, core.memory.rule) == (settings, rule, rule)
    core.require_initializer(lease, 0.0)
    core.central.theta[:] = 0
    core.initialized()
    core.pull(core.leases.get(lease))
    assert commit(core, lease, 1, np.ones(SMALL.size)).version == 1


def test_a_worker_may_bring_another_optimizer_as_long_as_there_is_no_run() -> None:
    core = make_core()
    threads = core.rule.threads
    core.register("ann", SMALL, 0.0, choice=ADAMW)
    core.register("ann", SMALL, 0.0, choice=OptimizerChoice("lion"))
    assert core.settings.optimizer == "lion"
    assert core.settings.weight_decay == 0
    assert core.rule.threads is threads  # which a server checks gradients with, too


def test_a_run_that_takes_the_optimizer_of_its_first_worker_takes_its_defaults_too() -> None:
    core = make_core(stated=["reply_wait"])
    core.register("ann", SMALL, 0.0, choice=ADAMW)
    assert (core.settings.smallest_share, core.settings.reply_wait, core.shares.smallest) == (1 / 16, 0.0, 1 / 16)


def test_the_last_worker_takes_its_optimizer_along() -> None:
    core = make_core()
    started_with = core.settings
    core.leave(core.register("ann", SMALL, 0.0, choice=ADAMW).lease_id)
    assert core.settings == started_with


@pytest.mark.parametrize("rate", [float("nan"), -1.0, float("inf")])
def test_an_invalid_rate_is_named(rate: float) -> None:
    core = make_core()
    with pytest.raises(InvalidRequest, match="--learning-rate must be"):
        core.register("ann", SMALL, 0.0, choice=OptimizerChoice("adamw", "", rate))
    assert not core.leases.live


def test_a_worker_can_not_bring_an_optimizer_that_ignores_what_the_user_stated() -> None:
    core = make_core(Hyperparameters(momentum=0.5), stated={"momentum"})
    with pytest.raises(InvalidRequest, match="--rule gem uses momentum with SGD alone"):
        core.register("ann", SMALL, 0.0, choice=OptimizerChoice("adamw"))


COSINE = Schedule("cosine", 10, 0.1, 90, 0.0)


def brings(schedule: Schedule | None) -> OptimizerChoice:
    return OptimizerChoice("adamw", "", 0.01, 0.1, schedule)


def test_the_first_workers_schedule_is_the_runs_and_others_bring_the_same_or_none() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0, choice=brings(COSINE))
    assert Schedule.of(core.settings) == COSINE
    core.register("bob", SMALL, 0.0, choice=brings(COSINE))
    core.register("cat", SMALL, 0.0, choice=brings(None))
    schedule = "warm-up from ×0.1 over 10, then cosine to ×0 over 90 commits of whole batches"
    run = f"this run's schedule is {schedule}, and the worker brings "
    for change in DIFFERENCES:
        other = replace(COSINE, **change)
        with pytest.raises(InvalidRequest, match=re.escape(f"{run}{other}: give all workers the same")):
            core.register("dan", SMALL, 0.0, choice=brings(other))
    assert len(core.leases.live) == 3


DIFFERENCES: list[dict[str, Any]] = [
    {"schedule": "onecycle"}, {"warmup_versions": 9}, {"warmup_factor": 0.0}, {"decay_versions": 91}, {"decay_factor": 0.5},
]  # fmt: skip


def test_a_worker_that_brings_a_schedule_to_a_run_without_is_refused() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0, choice=brings(None))
    with pytest.raises(InvalidRequest, match="this run's schedule is constant, and the worker brings warm-up from"):
        core.register("bob", SMALL, 0.0, choice=brings(COSINE))


@pytest.mark.parametrize("name", ["schedule", "warmup_versions", "warmup_factor", "decay_versions", "decay_factor"])
def test_one_part_of_a_schedule_that_the_user_stated_keeps_out_the_workers(name: str) -> None:
    started = Hyperparameters(schedule="step", warmup_versions=3, decay_versions=7, decay_factor=0.5)
    core = make_core(started, stated={name})
    core.register("ann", SMALL, 0.0, choice=brings(COSINE))
    core.register("bob", SMALL, 0.0, choice=brings(replace(COSINE, decay_versions=91)))
    assert Schedule.of(core.settings) == Schedule.of(started)
    assert core.settings.learning_rate == 0.01, "the rest is the worker's"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule("linear"), "--schedule must be one of"),
        (Schedule("cosine"), "--schedule cosine needs the number of commits"),
        (Schedule("step", decay_versions=1, decay_factor=float("nan")), "--schedule …:factor must be"),
        (Schedule("step", decay_versions=1, decay_factor=2.0), "--schedule …:factor must be"),
        (Schedule(warmup_versions=1, warmup_factor=-0.5), "--schedule …:warmup_factor must be"),
        (Schedule("cosine", decay_versions=(1 << 64) - 1), "--schedule …:versions must be"),
    ],
)
def test_an_invalid_schedule_is_named_and_changes_nothing(schedule: Schedule, words: str) -> None:
    core = make_core()
    before = core.settings
    with pytest.raises(InvalidRequest, match=words):
        core.register("ann", SMALL, 0.0, choice=brings(schedule))
    assert (core.settings, core.leases.live) == (before, {})


def test_a_refused_layout_changes_nothing() -> None:
    core = make_core()
    before = core.settings
    with pytest.raises(InvalidRequest):
        core.register("ann", Layout.of({"w": (2,)}, {"w": Group(2.0)}), 0.0, choice=ADAMW)
    assert core.settings == before
