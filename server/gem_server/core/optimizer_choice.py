"""Adopts or checks a worker's optimizer: a new run adopts it, and later workers must bring the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias

from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters, flag
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.schedule import Schedule

from gem_server.rules.optimizers import make_optimizer

Choice: TypeAlias = OptimizerChoice | None  # None: a worker that brings no optimizer
_SCHEDULE_FIELDS = frozenset(each.name for each in fields(Schedule))


def adopted(settings: Hyperparameters, stated: Collection[str], choice: Choice) -> Hyperparameters:
    """The hyper-parameters of a new run whose first worker brings `choice`.

    Args:
        settings: Those that the server was started with.
        stated: The names of those that the user gave: a worker can't change them.
        choice: None: the worker brings none, and nothing changes.

    Raises:
        InvalidRequest: The choice is invalid, or the user stated another optimizer.
    """
    if choice is None:
        return settings
    changes = {name: value for name, value in _as_settings(choice, stated).items() if name not in stated}
    settings = replace(settings, **changes).with_defaults({*stated, *changes})
    try:
        settings.require_valid()
        settings.require_used(stated)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    require_agreement(settings, choice, stated)
    return settings


def require_agreement(settings: Hyperparameters, choice: Choice, stated: Collection[str]) -> None:
    """Raises InvalidRequest if a worker brings another optimizer than the run's, or another setting of it.

    The learning rate, the weight decay and the schedule that the user has `stated` count instead of the worker's, for example
    after a restart with another rate."""
    if choice is None:
        return
    if choice.optimizer != settings.optimizer:
        raise InvalidRequest(_other_optimizer(settings.optimizer, choice.optimizer))
    try:
        ours = make_optimizer(settings.optimizer, settings.optimizer_options)
        theirs = make_optimizer(choice.optimizer, choice.options)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    if ours != theirs:
        raise InvalidRequest(f"this run has {ours}, and the worker brings {theirs}: give all workers the same settings")
    for name in ("learning_rate", "weight_decay"):
        own, brought = getattr(settings, name), getattr(choice, name)
        if name not in stated and brought is not None and brought != own:
            raise InvalidRequest(
                f"the first worker brought {flag(name)} {own}, and this one brings {brought}: give all workers the same"
            )
    run, schedule = Schedule.of(settings), _schedule(choice, stated)
    if schedule is not None and schedule != run:
        raise InvalidRequest(
            f"this run's schedule is {run}, and the worker brings {schedule}: give all workers the same, "
            "or restart the server with --resume and a --schedule, which counts instead"
        )


def _as_settings(choice: OptimizerChoice, stated: Collection[str]) -> dict[str, Any]:
    """The hyper-parameters that a choice sets."""
    values = {
        "optimizer": choice.optimizer, "optimizer_options": choice.options,
        "learning_rate": choice.learning_rate, "weight_decay": choice.weight_decay,
    }  # fmt: skip
    schedule = _schedule(choice, stated)
    brought = asdict(schedule) if schedule is not None else {}
    return {name: value for name, value in values.items() if value is not None} | brought


def _schedule(choice: OptimizerChoice, stated: Collection[str]) -> Schedule | None:
    """The worker's schedule; None if the user has stated a part of one: parts of two schedules are none."""
    return choice.schedule if _SCHEDULE_FIELDS.isdisjoint(stated) else None


def _other_optimizer(ours: str, theirs: str) -> str:
    run = {
        "worker": "in this run each worker makes the steps of its own optimizer",
        "sgd": "this run applies SGD on the server",
    }.get(ours, f"this run has {ours} on the server, for all workers")
    if theirs == "worker":
        return (
            f'{run}: use {ours.upper() if ours == "sgd" else ours} with Optimizer(..., on="server"), or without PyTorch join '
            "without `optimizer` and commit gradients; or start the run with --optimizer worker"
        )
    if ours == "worker":
        return f'{run}: use Optimizer(...) without on="server", or start the server with --optimizer {theirs}'
    return f"{run}, and the worker brings {theirs[:50]!r}: give all workers the same optimizer"
