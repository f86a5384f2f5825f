"""What the run's settings may be: all that the contract can carry to the workers, and nothing more."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import click
import numpy as np
import pytest
from core_helpers import commit, make_core, start
from gem_api.hyperparameters import Hyperparameters
from gem_server.cli import main as server
from gem_server.durability.schema import require
from gem_server.durability.state_form import SETTINGS

OPTIONS = {option.name: option for option in server.params if option.name in vars(Hyperparameters())}


def largest(option: click.Parameter) -> Any:
    """The largest value, or the last choice, that the command line lets through."""
    kind = option.type
    if isinstance(kind, click.Choice):
        return kind.choices[-1]
    if isinstance(kind, click.IntRange):
        return kind.max if kind.max is not None else 1 << 70
    if isinstance(kind, click.FloatRange):
        return math.nextafter(kind.max, 0) if kind.max is not None and kind.max_open else kind.max or 1.7e308
    return "δ=1 " * 100


@pytest.mark.parametrize("name", [field.name for field in fields(Hyperparameters)])
def test_the_largest_value_that_the_command_takes_reaches_the_workers_and_the_checkpoints(name: str) -> None:
    settings = replace(Hyperparameters(), **{name: largest(OPTIONS[name])})
    assert Hyperparameters.from_message(settings.to_message()) == settings
    require({**vars(settings)}, SETTINGS, "hyperparameters")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 1 << 32), ("epochs", -1), ("steps", 1 << 63), ("warmup_versions", 1 << 64), ("decay_versions", 1 << 64),
        ("seed", 1 << 63), ("batch_size", 1 << 32), ("rule_options", "proxy=\udcff"),
    ],
)  # fmt: skip
def test_what_the_contract_cannot_carry_is_refused_before_a_worker_asks(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
        make_core(replace(Hyperparameters(), **{name: value}))
    core = make_core(Hyperparameters())
    if name in ("epochs", "steps", "warmup_versions", "decay_versions"):  # those that a resumed run may change
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            core.change(replace(core.settings, **{name: value}))


@pytest.mark.parametrize("flags", [["--epochs", "4294967296"], ["--steps", "18446744073709551616"]], ids=" ".join)
def test_the_command_refuses_it_with_the_range(flags: list[str]) -> None:
    with pytest.raises(click.UsageError, match="is not in the range 0<=x<="):
        server.make_context("gem-server", flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rule_options": "proxy=adam"}, {"pi_max": 1e6, "learning_rate": 0.003, "epsilon": 1e-16}),
        ({"rule_options": "proxy=adam", "pi_max": 5.0, "learning_rate": 0.05}, {"pi_max": 5.0, "learning_rate": 0.05}),
        ({"snapshot": "reference"}, {"pi_max": 5.0, "epsilon": 1e-12}),
        ({"snapshot": "reference", "epsilon": 1e-16}, {"epsilon": 1e-16}),
        ({"rule": "aeasgd", "snapshot": "reference"}, {"epsilon": 1e-16}),
    ],
    ids=str,
)
def test_defaults_follow_the_proxy_and_the_convention_unless_given(flags: dict[str, Any], expected: dict[str, float]) -> None:
    settings = Hyperparameters(**flags).with_defaults(flags.keys())
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_schedule_and_the_learning_rate_scale_the_step_of_the_adam_proxy() -> None:
    """The first step is η·m̂/√v̂ = η whatever the gradient, so θ moves by −η."""
    for rate in (0.5, 0.25):
        settings = Hyperparameters(rule_options="proxy=adam", learning_rate=rate, pi_max=1e6)
        core = make_core(settings)
        (ann,) = start(core)
        before = core.central.theta.copy()
        commit(core, ann, 1, 1e-3)
        np.testing.assert_allclose(before - core.central.theta, rate, rtol=1e-4)
