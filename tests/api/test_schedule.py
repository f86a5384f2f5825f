"""Schedules of the learning rate: exact at every edge, validated at the start, applied by the server to gradients only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gem_api.hyperparameters import FIXED, Hyperparameters
from gem_api.layout import Layout
from gem_api.schedule import Schedule, factor, rate
from gem_server.durability.resume import resumed_hyperparameters
from kit.core import commit, make_core, restored, save_core, start

ONE = Layout.of({"w": (1,)})


def values(settings: Hyperparameters, *versions: int) -> list[float]:
    return [factor(settings, version) for version in versions]


def test_a_constant_rate_is_the_learning_rate_at_every_version() -> None:
    assert values(Hyperparameters(), 0, 1, 10**9) == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_steps_and_ends_at_the_whole_rate() -> None:
    settings = Hyperparameters(warmup_versions=4)
    assert values(settings, 0, 1, 2, 3, 4, 5) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_may_begin_at_a_share_and_reach_the_whole_rate_after_it() -> None:
    settings = Hyperparameters(warmup_versions=4, warmup_factor=0.2)
    assert values(settings, 0, 1, 2, 3, 4, 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0], abs=1e-15)
    then = Hyperparameters(schedule="step", warmup_versions=4, warmup_factor=0.2, decay_versions=2, decay_factor=0.5)
    assert values(then, 4, 5, 6) == [1.0, 1.0, 0.5]


def test_one_cycle_rises_and_falls_in_two_halves_of_a_cosine() -> None:
    settings = Hyperparameters(schedule="onecycle", warmup_versions=4, warmup_factor=0.2, decay_versions=8, decay_factor=0.1)
    assert values(settings, 0, 2, 4, 8, 12, 99) == pytest.approx([0.2, 0.6, 1.0, 0.55, 0.1, 0.1], abs=1e-15)
    assert values(settings, 1)[0] == pytest.approx(0.2 + 0.8 * (2 - 2**0.5) / 4, abs=1e-15)  # an eighth of a turn
    from_nothing = Hyperparameters(schedule="onecycle", warmup_versions=2, decay_versions=8)
    assert values(from_nothing, 0, 1, 2) == pytest.approx([0.5, 1.0, 1.0], abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule(), "constant"),
        (Schedule(warmup_versions=5), "warm-up over 5 versions"),
        (Schedule("step", 5, 0.25, 9, 0.5), "warm-up from ×0.25 over 5 versions, then ×0.5 every 9 versions"),
        (Schedule("cosine", 0, 0.0, 9, 0.0), "cosine to ×0 over 9 versions"),
        (
            Schedule("onecycle", 3, 0.04, 9, 4e-6),
            "cosine warm-up from ×0.04 over 3 versions, then cosine to ×4e-06 over 9 versions",
        ),
    ],
)
def test_a_schedule_says_what_it_is(schedule: Schedule, words: str) -> None:
    assert str(schedule) == words


def test_steps_fall_at_their_version_and_not_before() -> None:
    settings = Hyperparameters(schedule="step", decay_versions=10, decay_factor=0.5)
    assert values(settings, 0, 9, 10, 19, 20, 29, 30) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_steps_are_counted_from_the_end_of_warm_up() -> None:
    settings = Hyperparameters(schedule="step", warmup_versions=4, decay_versions=10, decay_factor=0.5)
    assert values(settings, 3, 4, 13, 14) == [1.0, 1.0, 1.0, 0.5]


def test_a_cosine_begins_at_one_is_halfway_in_the_middle_and_stays_at_its_end() -> None:
    settings = Hyperparameters(schedule="cosine", warmup_versions=2, decay_versions=8, decay_factor=0.2)
    assert values(settings, 0, 1, 2) == [0.5, 1.0, 1.0]
    assert values(settings, 6, 10, 11, 10**6) == pytest.approx([0.6, 0.2, 0.2, 0.2], abs=1e-15)
    assert values(settings, 4)[0] == pytest.approx(0.2 + 0.8 * (2 + 2**0.5) / 4, abs=1e-15)  # an eighth of a turn


def test_a_cosine_can_end_at_nought_and_a_step_of_nought_stops_there() -> None:
    assert values(Hyperparameters(schedule="cosine", decay_versions=4, decay_factor=0.0), 4, 5) == [0.0, 0.0]
    assert values(Hyperparameters(schedule="step", decay_versions=4, decay_factor=0.0), 3, 4, 8) == [1.0, 0.0, 0.0]


def test_the_rate_is_the_learning_rate_times_the_factor() -> None:
    assert rate(Hyperparameters(learning_rate=0.4, warmup_versions=2), 0) == 0.2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": "linear"}, "--schedule must be one of constant, step, cosine, onecycle, not 'linear'"),
        ({"schedule": "step"}, "--schedule step needs the number of commits that it takes: write --schedule step:versions=N"),
        ({"schedule": "cosine"}, "--schedule cosine needs the number of commits"),
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
    assert {"rule", "rule_options", "local_steps"} <= set(FIXED)
    kept = Hyperparameters(rule="fedbuff", rule_options="buffer_size=4")
    with pytest.raises(ValueError, match="--rule was buffer_size=4"):
        resumed_hyperparameters(kept, Hyperparameters(rule_options="buffer_size=8"), frozenset({"rule_options"}))


def test_a_resumed_run_refuses_a_schedule_that_means_nothing() -> None:
    core = make_core(Hyperparameters())
    with pytest.raises(ValueError, match="needs the number of commits"):
        core.change(Hyperparameters(schedule="cosine"))
