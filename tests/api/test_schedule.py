"""Schedules of the learning rate: exact at every edge, validated at the start, applied by the server to gradients only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.schedule import Schedule, eta_change, factor, misfit
from gem_server.durability.resume import resumed_hyperparameters
from kit.core import commit, make_core, restored, save_core, start

ONE = Layout.of({"w": (1,)})
ROOT = 2**0.5  # an eighth of a turn
FACTORS: dict[str, tuple[Schedule, dict[int, float]]] = {
    "a constant rate": (Schedule(), {0: 1, 1: 1, 10**9: 1}),
    "a warm-up, in equal steps": (Schedule(warmup_versions=4), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 5: 1}),
    "a warm-up from a share of the rate": (
        Schedule(warmup_versions=4, warmup_factor=0.2), {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1, 5: 1},
    ),
    "steps after such a warm-up": (Schedule("step", 4, 0.2, 2, 0.5), {4: 1, 5: 1, 6: 0.5}),
    "one cycle, in two halves of a cosine": (
        Schedule("onecycle", 4, 0.2, 8, 0.1), {0: 0.2, 1: 0.2 + 0.8 * (2 - ROOT) / 4, 2: 0.6, 4: 1, 8: 0.55, 12: 0.1, 99: 0.1},
    ),
    "one cycle from nothing": (Schedule("onecycle", 2, 0.0, 8), {0: 0.5, 1: 1, 2: 1}),
    "steps at their version and not before": (
        Schedule("step", 0, 0.0, 10, 0.5), {0: 1, 9: 1, 10: 0.5, 19: 0.5, 20: 0.25, 29: 0.25, 30: 0.125},
    ),
    "steps counted from the end of warm-up": (Schedule("step", 4, 0.0, 10, 0.5), {3: 1, 4: 1, 13: 1, 14: 0.5}),
    "a cosine, halfway in the middle": (
        Schedule("cosine", 2, 0.0, 8, 0.2), {0: 0.5, 1: 1, 2: 1, 4: 0.2 + 0.8 * (2 + ROOT) / 4, 6: 0.6, 10: 0.2, 10**6: 0.2},
    ),
    "a cosine to nought": (Schedule("cosine", 0, 0.0, 4, 0.0), {4: 0, 5: 0}),
    "a step to nought": (Schedule("step", 0, 0.0, 4, 0.0), {3: 1, 4: 0, 8: 0}),
}  # fmt: skip


@pytest.mark.parametrize("what", FACTORS)
def test_the_factor_of_the_learning_rate(what: str) -> None:
    schedule, factors = FACTORS[what]
    settings = Hyperparameters(**vars(schedule))
    assert {version: factor(settings, version) for version in factors} == pytest.approx(factors, abs=1e-15)


def test_after_a_resume_what_is_left_counts() -> None:
    """The schedule has ended where the first start's epochs did; 4 % more of them would all be at rate 0."""
    settings = Hyperparameters(learning_rate=1.0, schedule="cosine", decay_versions=100, decay_factor=0.0)
    assert misfit(settings, 104.0) == ""
    assert "ends after about 0 % of what is left of the run; the learning rate is 0 from" in misfit(settings, 104.0, 100.0)
    assert misfit(settings, 104.0, 50.0) == ""


@pytest.mark.parametrize(
    ("schedule", "optimizer", "commits", "said"),
    [
        (Schedule("cosine", 10, 0.0, 40, 0.0), "adamw", 100.0, "ends after about 50 % of the run; the learning rate is 0 from"),
        (Schedule("cosine", 10, 0.0, 40, 0.1), "sgd", 100.0, "ends after about 50 % of the run; the learning rate is 0.1 from"),
        (
            Schedule("onecycle", 0, 0.0, 200, 0.0),
            "sgd",
            100.0,
            "only 50 % done at the run's end; the learning rate is still 0.5",
        ),
        (Schedule("cosine", 0, 0.0, 91, 0.0), "sgd", 100.0, ""),
        (Schedule("cosine", 0, 0.0, 109, 0.0), "sgd", 100.0, ""),
        (Schedule("cosine", 0, 0.0, 9, 0.0), "worker", 100.0, ""),
        (Schedule("step", 0, 0.0, 9), "sgd", 100.0, ""),
        (Schedule(), "sgd", 100.0, ""),
    ],
)
def test_a_schedule_that_does_not_end_with_the_run_is_said(
    schedule: Schedule, optimizer: str, commits: float, said: str
) -> None:
    found = misfit(Hyperparameters(optimizer=optimizer, learning_rate=1.0, **vars(schedule)), commits)
    assert (said in found, bool(found)) == (True, bool(said))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(), "constant"),
        (Schedule(warmup_versions=5), "warm-up over 5 commits of whole batches"),
        (Schedule("step", 5, 0.25, 9, 0.5), "warm-up from ×0.25 over 5, then ×0.5 every 9 commits of whole batches"),
        (Schedule("cosine", 0, 0.0, 9, 0.0), "cosine to ×0 over 9 commits of whole batches"),
        (
            Schedule("onecycle", 3, 0.04, 9, 4e-6),
            "cosine warm-up from ×0.04 over 3, then cosine to ×4e-06 over 9 commits of whole batches",
        ),
    ],
)
def test_a_schedule_says_what_it_is(schedule: Schedule, words: str) -> None:
    assert str(schedule) == words


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": "linear"}, "--schedule must be one of constant, step, cosine, onecycle, not 'linear'"),
        ({"schedule": "step"}, "--schedule step needs the number of commits that it takes: write --schedule step:versions=N"),
        ({"schedule": "onecycle", "warmup_versions": 9}, "--schedule onecycle needs the number of commits"),
        ({"warmup_versions": 9, "warmup_factor": 1.5}, "--schedule …:warmup_factor must be at least 0 and at most 1"),
        (
            {"schedule": "step", "decay_versions": 1, "decay_factor": 1.5},
            "--schedule …:factor must be at least 0 and at most 1",
        ),
        ({"decay_factor": float("nan")}, "--schedule …:factor must be at least 0 and at most 1"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused_at_the_start(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_core(Hyperparameters(**settings))  # type: ignore[arg-type]


SCHEDULED = {"learning_rate": 0.5, "schedule": "step", "decay_versions": 1, "decay_factor": 0.5}


@pytest.mark.parametrize("rule", ["gem", "downpour", "adaptive", "agn", "dcasgd", "ringmaster"])
def test_the_server_applies_a_gradient_with_the_rate_of_the_version_that_it_meets(rule: str) -> None:
    core = make_core(Hyperparameters(rule=rule, momentum=0.0, **SCHEDULED))  # type: ignore[arg-type]
    (lease,) = start(core, ["ann"], ONE, 0.0)
    thetas = []
    for sequence in (1, 2, 3):
        commit(core, lease, sequence, 1.0)
        thetas.append(float(core.central.theta[0]))
    assert thetas == pytest.approx([-0.5, -0.75, -0.875])


@pytest.mark.parametrize("rule", ["downpour", "adaptive", "fedbuff"])
def test_a_delta_has_its_rate_in_it_already(rule: str) -> None:
    settings = Hyperparameters(rule=rule, local_steps=4, **SCHEDULED)  # type: ignore[arg-type]
    core = make_core(settings if rule != "fedbuff" else Hyperparameters(**{**vars(settings), "rule_options": "buffer_size=1"}))
    (lease,) = start(core, ["ann"], ONE, 0.0)
    for sequence in (1, 2, 3):
        commit(core, lease, sequence, -1.0)
    assert core.central.theta.tolist() == [-3.0]


def test_a_resumed_run_goes_on_in_its_schedule_and_may_be_given_another(tmp_path: Path) -> None:
    """The version is the place in it: nothing else is kept."""
    settings = Hyperparameters(rule="downpour", **SCHEDULED)  # type: ignore[arg-type]
    core = make_core(settings)
    (lease,) = start(core, ["ann"], ONE, 0.0)
    commit(core, lease, 1, 1.0)
    save_core(core, tmp_path)
    again = restored(tmp_path, settings)
    commit(again, lease, 2, 1.0)
    assert again.central.theta.tolist() == [-0.75]
    asked = Hyperparameters(schedule="constant", weight_decay=0.1)
    changed = resumed_hyperparameters(settings, asked, frozenset({"schedule", "weight_decay"}))
    again.change(changed)
    commit(again, lease, 3, 1.0)
    assert again.central.theta.tolist() == [-1.25]
    assert changed.weight_decay == 0.1


def test_a_resumed_run_keeps_its_rule_and_the_rules_options() -> None:
    kept = Hyperparameters(rule="fedbuff", rule_options="buffer_size=4")
    with pytest.raises(ValueError, match="--rule was buffer_size=4"):
        resumed_hyperparameters(kept, Hyperparameters(rule_options="buffer_size=8"), frozenset({"rule_options"}))


def test_a_resumed_run_refuses_a_schedule_that_means_nothing() -> None:
    core = make_core(Hyperparameters())
    with pytest.raises(ValueError, match="needs the number of commits"):
        core.change(Hyperparameters(schedule="cosine"))


def test_a_moment_changes_with_the_rate_unless_that_was_nearly_zero() -> None:
    falling = Hyperparameters(schedule="step", decay_versions=10, decay_factor=0.1)
    assert eta_change(factor(falling, 10), factor(falling, 9)) == pytest.approx(0.1)
    assert eta_change(factor(falling, 25), factor(falling, 3)) == pytest.approx(0.01)
    assert eta_change(0.01, 0.0) == 1
    for begin in (1e-40, 5e-324):  # the ratio would overflow, and 0 times infinity is no number
        rising = Hyperparameters(warmup_versions=2, warmup_factor=begin)
        assert eta_change(factor(rising, 5), factor(rising, 0)) == 1


def test_a_resumed_run_refuses_a_changed_setting_that_its_rule_does_not_use_and_keeps_an_old_one() -> None:
    kept = Hyperparameters(optimizer="adamw", momentum=0.5)
    given = frozenset({"momentum"})
    assert resumed_hyperparameters(kept, kept, given) == kept
    with pytest.raises(ValueError, match="uses momentum with SGD alone"):
        resumed_hyperparameters(kept, Hyperparameters(optimizer="adamw", momentum=0.25), given)
