"""The declarations of the hyper-parameters: their ranges, and that the contract and checkpoints can carry every value."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

import click
import pytest
from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, Hyperparameters, flag
from gem_server.cli import main as server
from gem_server.durability.state import require_hyperparameters
from kit.core import make_core


def largest(name: str) -> Any:
    """The largest value, or the last choice, that is declared."""
    allowed = DECLARATIONS[name].values
    if isinstance(allowed, tuple):
        return allowed[-1]
    if allowed is None:
        return "δ=1 " * 100
    if isinstance(DEFAULTS[name], int):
        return allowed.le if allowed.le is not None else 1 << 70
    return math.nextafter(allowed.lt, 0) if allowed.lt is not None else allowed.le or 1.7e308


@pytest.mark.parametrize("name", [field.name for field in fields(Hyperparameters)])
def test_the_largest_value_reaches_the_workers_and_the_checkpoints(name: str) -> None:
    settings = replace(Hyperparameters(), **{name: largest(name)})
    assert Hyperparameters.from_message(settings.to_message()) == settings
    require_hyperparameters(vars(settings), "hyperparameters")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 1 << 32), ("epochs", -1), ("steps", 1 << 63), ("warmup_versions", 1 << 64), ("decay_versions", 1 << 64),
        ("seed", 1 << 63), ("batch_size", 1 << 32), ("rule_options", "proxy=\udcff"),
    ],
)  # fmt: skip
def test_what_the_contract_cannot_carry_is_refused_before_a_worker_asks(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=flag(name)):
        make_core(replace(Hyperparameters(), **{name: value}))
    core = make_core(Hyperparameters())
    if name in ("epochs", "steps", "warmup_versions", "decay_versions"):  # those that a resumed run may change
        with pytest.raises(ValueError, match=flag(name)):
            core.change(replace(core.settings, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learning_rate", math.nan, "--learning-rate must be greater than 0, not nan"),
        ("learning_rate", 10**400, f"--learning-rate must be greater than 0, not {10**49}"),
        ("average", 1.0, "--average must be at least 0 and less than 1, not 1.0"),
        ("pi_max", math.inf, "--rule …:pi_max must be greater than 0, not inf"),
        ("momentum", 1.0, "--rule …:momentum must be at least 0 and less than 1, not 1.0"),
        ("epochs", -1, "--epochs must be at least 0 and at most 4294967295, not -1"),
        ("epochs", True, "--epochs must be of type int, not 'True'"),
        ("schedule", "linear", "--schedule must be one of constant, step, cosine, onecycle, not 'linear'"),
        ("rule", 3, "--rule must be of type str, not '3'"),
        ("rule_options", "proxy=\udcff", "--rule is not valid UTF-8: 'proxy=\\udcff'"),
    ],
)  # fmt: skip
def test_a_value_outside_of_its_declaration_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        replace(Hyperparameters(), **{name: value}).require_valid()


def test_a_whole_number_is_valid_for_every_real_hyperparameter() -> None:
    assert isinstance(DEFAULTS["kappa"], float)
    Hyperparameters(kappa=1).require_valid()


def test_what_a_resumed_run_keeps_and_what_workers_use() -> None:
    """A resumed run may change any other hyper-parameter; workers register again after a change of those that they use."""
    kept = {
        "rule", "rule_options", "snapshot", "local_steps", "batch_size", "shards", "shard_size", "seed", "optimizer",
        "optimizer_options",
    }  # fmt: skip
    assert {name for name, declared in DECLARATIONS.items() if declared.fixed} == kept
    assert {name for name, declared in DECLARATIONS.items() if declared.workers_use and not declared.fixed} == {
        "learning_rate", "schedule", "warmup_versions", "warmup_factor", "decay_versions", "decay_factor",
        "weight_decay", "local_momentum", "steps", "batch_variation", "smallest_share",
    }  # fmt: skip


@pytest.mark.parametrize("flags", [["--epochs", "4294967296"], ["--steps", "18446744073709551616"]], ids=" ".join)
def test_the_command_refuses_it_with_the_range(flags: list[str]) -> None:
    with pytest.raises(click.UsageError, match="is not in the range 0<=x<="):
        server.make_context("gem-server", flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rule_options": "proxy=adam"}, {"pi_max": 1e6, "learning_rate": 0.003, "epsilon": 1e-16}),
        ({"snapshot": "reference", "pi_max": 4.0}, {"pi_max": 4.0, "epsilon": 1e-12}),
        ({"rule": "aeasgd", "snapshot": "reference"}, {"epsilon": 1e-16}),
        ({"optimizer": "adamw"}, {"learning_rate": 0.001, "weight_decay": 0.01, "kappa": 1.5, "pi_max": 1.0}),
        ({"optimizer": "adamw", "rule": "downpour", "weight_decay": 0.0}, {"learning_rate": 0.001, "weight_decay": 0.0}),
    ],
    ids=str,
)
def test_defaults_follow_the_proxy_and_the_convention_unless_given(flags: dict[str, Any], expected: dict[str, float]) -> None:
    settings = Hyperparameters(**flags).with_defaults(flags.keys())
    assert {name: getattr(settings, name) for name in expected} == expected


OFF, IN_STEP = (1.0, 0.0), (1 / 16, 0.15)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"optimizer": "lion"}, IN_STEP),
        ({"optimizer": "worker"}, OFF),
        ({"optimizer": "adamw", "rule": "downpour"}, OFF),
        ({"optimizer": "adamw", "batch_variation": 0.9}, OFF),
        ({"optimizer": "adamw", "local_steps": 4}, OFF),
        ({"optimizer": "adamw", "reply_wait": 0.0}, (1 / 16, 0.0)),
        ({"smallest_share": 0.5, "reply_wait": 0.1}, (0.5, 0.1)),
    ],
    ids=str,
)
def test_workers_are_kept_in_step_by_default_only_around_the_servers_adaptive_optimizers(
    flags: dict[str, Any], expected: tuple[float, float]
) -> None:
    settings = Hyperparameters(**flags).with_defaults(flags.keys())
    assert (settings.smallest_share, settings.reply_wait) == expected


@pytest.mark.parametrize(("name", "value"), [("momentum", 0.5), ("snapshot", "paper")])
def test_a_setting_of_the_papers_rule_is_refused_around_another_optimizer(name: str, value: object) -> None:
    flags: dict[str, Any] = {"optimizer": "adamw", name: value}
    with pytest.raises(ValueError, match=f"--rule gem uses {name} with SGD alone, not with --optimizer adamw: leave it out"):
        Hyperparameters(**flags).require_used(flags.keys())
    Hyperparameters(**flags).require_used({"optimizer"})  # an older run goes on
    Hyperparameters(optimizer="adamw").require_used({name})  # the default means nothing, too
