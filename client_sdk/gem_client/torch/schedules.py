"""A scheduler of PyTorch, read as a schedule that the server can follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gem_api.errors import InvalidRequest
from gem_api.schedule import Schedule
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

_MAX_COUNT = (1 << 63) - 1
_RECOGNISED = (
    "CosineAnnealingLR, StepLR, LinearLR as a warm-up, SequentialLR of such a LinearLR and one of the other two, or "
    "OneCycleLR with cycle_momentum=False"
)
EACH_ITS_OWN = 'have each worker make its own steps: on="worker", without schedule='


def name_of_rate(scheduler: LRScheduler | None) -> str:
    """The entry of a parameter group that holds its rate at a factor of 1. A scheduler has changed `lr` by the time it is
    made."""
    return "lr" if scheduler is None else "max_lr" if type(scheduler) is OneCycleLR else "initial_lr"


def schedule_of(scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> Schedule:
    """The schedule whose factor at version t is that of the scheduler after t steps.

    A cosine of PyTorch rises again after T_max steps; the server's stays at its end.

    Raises InvalidRequest if the server can't follow it, if it belongs to another optimizer, or if it was stepped before."""
    if not isinstance(scheduler, LRScheduler):
        raise InvalidRequest(f"schedule is a scheduler of PyTorch, not {type(scheduler).__name__}")
    if scheduler.optimizer is not optimizer:
        raise InvalidRequest("the schedule belongs to another optimizer: make it with the one that is given to Optimizer")
    if scheduler.last_epoch:
        raise InvalidRequest(
            f"the schedule was stepped {scheduler.last_epoch} times: give it as it was made, because the run's version says "
            "how far it is"
        )
    read = _READ.get(type(scheduler))
    if read is None:
        raise InvalidRequest(f"the server can't follow {type(scheduler).__name__}: use {_RECOGNISED}, or {EACH_ITS_OWN}")
    return read(scheduler)


def _linear(scheduler: Any) -> Schedule:
    if scheduler.end_factor != 1:
        raise InvalidRequest(f"LinearLR is the warm-up of a schedule: its end_factor must be 1, not {scheduler.end_factor}")
    count = _count("LinearLR's total_iters", scheduler.total_iters)
    return Schedule(warmup_versions=count, warmup_factor=float(scheduler.start_factor))


def _step(scheduler: Any) -> Schedule:
    count, share = _count("StepLR's step_size", scheduler.step_size), _share("StepLR's gamma", scheduler.gamma)
    return Schedule("step", decay_versions=count, decay_factor=share)


def _cosine(scheduler: Any) -> Schedule:
    rates = [float(rate) for rate in scheduler.base_lrs]
    lowest, count = float(scheduler.eta_min), _count("CosineAnnealingLR's T_max", scheduler.T_max)
    if lowest and min(rates) != max(rates):
        raise InvalidRequest(
            f"CosineAnnealingLR's eta_min must be 0 if parameter groups have different learning rates, not {lowest}: on the "
            "server all groups have one schedule"
        )
    if not 0 <= lowest <= max(rates):
        raise InvalidRequest(f"CosineAnnealingLR's eta_min must be at least 0 and at most the learning rate, not {lowest}")
    return Schedule("cosine", decay_versions=count, decay_factor=lowest / (max(rates) or 1.0))


def _sequential(scheduler: Any) -> Schedule:
    first, *others = scheduler._schedulers
    kinds = [type(each) for each in scheduler._schedulers]
    if kinds not in ([LinearLR, CosineAnnealingLR], [LinearLR, StepLR]):
        found = ", ".join(kind.__name__ for kind in kinds)
        raise InvalidRequest(f"SequentialLR must hold LinearLR, then CosineAnnealingLR or StepLR, not {found}")
    rise, fall = _linear(first), _READ[kinds[1]](others[0])
    if list(scheduler._milestones) != [rise.warmup_versions]:
        raise InvalidRequest(
            f"SequentialLR must go on where its warm-up ends: use milestones=[{rise.warmup_versions}], LinearLR's total_iters, "
            f"not {scheduler._milestones}"
        )
    return replace(fall, warmup_versions=rise.warmup_versions, warmup_factor=rise.warmup_factor)


def _one_cycle(scheduler: Any) -> Schedule:
    wanted = {
        "cycle_momentum=False": not scheduler.cycle_momentum,
        'anneal_strategy="cos"': scheduler._anneal_func_type == "cos",
        "three_phase=False": len(scheduler._schedule_phases) == 2,
    }
    if missing := [argument for argument, given in wanted.items() if not given]:
        raise InvalidRequest(
            f"the server can follow OneCycleLR only with {', '.join(missing)}: make it so, on a new optimizer, because "
            "cycle_momentum=True has changed the betas"
        )
    highest, steps = scheduler._schedule_phases[0]["end_step"], scheduler.total_steps
    peak = round(highest)
    if abs(highest - peak) > 1e-6 or not 0 < peak < steps - 1:
        nearest = max(1, min(peak, steps - 2))
        raise InvalidRequest(
            f"OneCycleLR must be highest at a whole commit before its last, not at {highest:g}: use "
            f"pct_start={(nearest + 1) / steps} with total_steps={steps}, at least 3"
        )
    group = max(scheduler.optimizer.param_groups, key=lambda group: float(group["max_lr"]))
    start, end = (float(group[name]) / float(group["max_lr"]) for name in ("initial_lr", "min_lr"))
    start, end = _share("OneCycleLR's 1/div_factor", start), _share("OneCycleLR's 1/(div_factor·final_div_factor)", end)
    return Schedule("onecycle", peak, start, steps - 1 - peak, end)


def _count(name: str, value: Any) -> int:
    if not (1 <= value <= _MAX_COUNT and value == int(value)):
        raise InvalidRequest(f"{name} must be a whole number of commits, at least 1, not {value}")
    return int(value)


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InvalidRequest(f"{name} must be at least 0 and at most 1, not {value}")
    return float(value)


_READ: dict[type, Callable[[Any], Schedule]] = {
    CosineAnnealingLR: _cosine,
    StepLR: _step,
    LinearLR: _linear,
    SequentialLR: _sequential,
    OneCycleLR: _one_cycle,
}
