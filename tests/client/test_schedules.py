"""A scheduler of PyTorch handed to the server: the same rates, one schedule for all workers, and what is refused."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from client.brought_helpers import PLAIN, adamw, assert_close, make_model, simple, train
from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import Schedule, rate
from gem_client import connect
from gem_client.torch import Optimizer
from gem_client.torch.optimizer_spec import describe_optimizer
from kit.model import version
from kit.server import config, serving
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

STEPS = 60
Torch = torch.optim.Optimizer
Make = Callable[[Torch], LRScheduler]


def cosine(optimizer: Torch) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=STEPS)


def warm_cosine(optimizer: Torch, start: float = 0.1, length: int = 10, milestone: int = 10) -> LRScheduler:
    rise = LinearLR(optimizer, start_factor=start, total_iters=length)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, T_max=STEPS - length)], [milestone])


def warm_steps(optimizer: Torch) -> LRScheduler:
    rise = LinearLR(optimizer, start_factor=0.001, total_iters=7)
    return SequentialLR(optimizer, [rise, StepLR(optimizer, step_size=9, gamma=0.7)], [7])


def one_cycle(optimizer: Torch, **settings: Any) -> LRScheduler:
    chosen = {"total_steps": STEPS + 1, "pct_start": 21 / (STEPS + 1), "cycle_momentum": False, **settings}
    return OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], **chosen)


FOLLOWED: dict[str, Make] = {
    "cosine": cosine,
    "step": lambda optimizer: StepLR(optimizer, step_size=13, gamma=0.3),
    "warm-up": lambda optimizer: LinearLR(optimizer, start_factor=1 / 3, total_iters=20),
    "warm-up of gem-server": lambda optimizer: LinearLR(optimizer, start_factor=1 / 20, total_iters=19),
    "warm-up and cosine": warm_cosine,
    "warm-up and steps": warm_steps,
    "one cycle": one_cycle,
    "one cycle of two commits' warm-up": lambda optimizer: one_cycle(optimizer, pct_start=3 / (STEPS + 1), div_factor=4.0),
}


@pytest.mark.parametrize("make", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_every_rate_of_every_group_is_that_of_pytorch(make: Make) -> None:
    optimizer, alone = adamw(make_model()), adamw(make_model())
    spec = describe_optimizer(optimizer, "server", schedule=make(optimizer))
    assert spec.choice is not None
    assert spec.choice.schedule is not None
    assert spec.choice.learning_rate == 0.01, "the rate at a factor of 1, whatever the scheduler has set at its start"
    settings = Hyperparameters(learning_rate=spec.choice.learning_rate, **asdict(spec.choice.schedule))
    scheduler = make(alone)
    for step in range(STEPS + 1):
        ours = [factor * rate(settings, step) for factor in spec.factors]
        assert ours == pytest.approx(scheduler.get_last_lr(), rel=1e-10, abs=1e-13), step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch misses the optimizer's steps, which change no rate
            if step < STEPS:
                scheduler.step()


def test_a_cosine_that_ends_above_0() -> None:
    for make in (simple, lambda model: torch.optim.AdamW([{"params": [p], "lr": 0.01} for p in model.parameters()])):
        optimizer = make(make_model())
        spec = describe_optimizer(optimizer, "server", schedule=CosineAnnealingLR(optimizer, T_max=20, eta_min=0.002))
        assert spec.choice is not None
        assert spec.choice.schedule == Schedule("cosine", decay_versions=20, decay_factor=0.2)


@pytest.mark.parametrize("make", [cosine, warm_cosine, one_cycle])
def test_one_worker_trains_as_without_a_server(make: Make) -> None:
    ours, theirs = make_model(), make_model()
    rival = adamw(theirs)
    train(theirs, rival, 40, make(rival))
    with serving(config(replace(PLAIN, rule="downpour"))) as live, connect(live.address) as session:
        inner = adamw(ours)
        train(ours, Optimizer(inner, session, on="server", schedule=make(inner)), 40)
        assert version(live) == 40
    assert_close(ours, theirs)


def test_the_steps_are_the_commits_of_all_workers(caplog: pytest.LogCaptureFixture) -> None:
    """Ann makes three, Bob two: both see the rate of the run's fifth. The worker's log and the server's say so."""
    caplog.set_level(logging.INFO)
    with serving(config(PLAIN)) as live, connect(live.address, name="ann") as ann, connect(live.address, name="bob") as bob:
        models, optimizers = [make_model(), make_model()], []
        for model, session in zip(models, (ann, bob), strict=True):
            inner = simple(model)
            optimizers.append(Optimizer(inner, session, on="server", schedule=cosine(inner)))
        for who, expected in [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)]:
            train(models[who], optimizers[who], 1)
            assert optimizers[who].param_groups[0]["lr"] == rate(live.server.core.settings, expected)
        assert live.server.core.settings.schedule == "cosine"
    assert (
        "the server's schedule counts the commits of all workers: cosine to ×0 over 60 commits of whole batches" in caplog.text
    )


def test_a_schedule_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    """The run keeps it. A worker that brings it again agrees; another length is another schedule, and the user's counts."""
    for number, start in enumerate((0, 4)):
        with serving(config(PLAIN, checkpoint_dir=tmp_path, resume=bool(number))) as live, connect(live.address) as session:
            model = make_model()
            inner = simple(model)
            optimizer = Optimizer(inner, session, on="server", schedule=warm_cosine(inner))
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (0.1 + 0.9 * start / 10))
            train(model, optimizer, 4)
    stated = config(
        replace(PLAIN, decay_versions=99), checkpoint_dir=tmp_path, resume=True, given=frozenset({"decay_versions"})
    )
    with serving(stated) as live, connect(live.address) as session:
        inner = simple(make_model())
        Optimizer(inner, session, on="server", schedule=warm_cosine(inner))
        assert Schedule.of(live.server.core.settings) == Schedule("cosine", 10, 0.1, 99, 0.0)


def test_a_schedule_that_the_user_stated_counts_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    """No part of the worker's is mixed in: the step's default factor is not the cosine's 0."""
    stated = config(replace(PLAIN, schedule="step", decay_versions=7), given=frozenset({"schedule", "decay_versions"}))
    with serving(stated) as live, connect(live.address) as session:
        inner = simple(make_model())
        Optimizer(inner, session, on="server", schedule=cosine(inner))
        assert Schedule.of(live.server.core.settings) == Schedule("step", decay_versions=7)
    said = (
        "started with the schedule ×0.1 every 7 commits of whole batches, which is used instead of cosine to ×0 over 60 commits"
    )
    assert said in caplog.text


def other_optimizers(optimizer: Torch) -> LRScheduler:
    return cosine(simple(make_model()))


def stepped(optimizer: Torch) -> LRScheduler:
    scheduler = cosine(optimizer)
    scheduler.step()
    return scheduler


REFUSED: dict[str, tuple[Callable[[Torch], Any], str]] = {
    "another kind": (lambda o: ConstantLR(o), "can't follow ConstantLR: use CosineAnnealingLR, StepLR, LinearLR as a warm-up"),
    "a function": (lambda o: LambdaLR(o, lambda step: 1.0), "can't follow LambdaLR: use CosineAnnealingLR, StepLR"),
    "no scheduler": (lambda o: "cosine", "schedule is a scheduler of PyTorch, not str"),
    "another optimizer's": (other_optimizers, "the schedule belongs to another optimizer"),
    "one that was stepped": (stepped, "the schedule was stepped 1 times: give it as it was made"),
    "a fall by LinearLR": (lambda o: LinearLR(o, 1.0, 0.1), r"end_factor must be 1, not 0\.1"),
    "a warm-up of no steps": (
        lambda o: LinearLR(o, total_iters=0),
        "total_iters must be a whole number of commits, at least 1",
    ),
    "half a step": (lambda o: CosineAnnealingLR(o, 7.5), r"T_max must be a whole number of commits, at least 1, not 7\.5"),  # type: ignore[arg-type]
    "no end": (lambda o: CosineAnnealingLR(o, float("inf")), "T_max must be a whole number of commits"),  # type: ignore[arg-type]
    "an end for groups that differ": (
        lambda o: CosineAnnealingLR(o, 10, eta_min=0.001),
        r"eta_min must be 0 if parameter groups have different learning rates, not 0\.001",
    ),
    "a rise by steps": (lambda o: StepLR(o, 10, gamma=2.0), r"StepLR's gamma must be at least 0 and at most 1, not 2\.0"),
    "a gap": (lambda o: warm_cosine(o, milestone=12), r"use milestones=\[10\], LinearLR's total_iters, not \[12\]"),
    "another order": (
        lambda o: SequentialLR(o, [StepLR(o, 3), LinearLR(o)], [5]),
        "must hold LinearLR, then CosineAnnealingLR or StepLR, not StepLR, LinearLR",
    ),
    "momentum in cycles": (
        lambda o: one_cycle(o, cycle_momentum=True),
        "OneCycleLR only with cycle_momentum=False: make it so, on a new optimizer",
    ),
    "straight lines, three phases": (
        lambda o: one_cycle(o, anneal_strategy="linear", three_phase=True),
        'only with anneal_strategy="cos", three_phase=False',
    ),
    "a peak between two commits": (
        lambda o: one_cycle(o, total_steps=1005, pct_start=0.3),
        r"not at 300\.5: use pct_start=0\.29950248756218906 with total_steps=1005",
    ),
    "a start above the peak": (
        lambda o: one_cycle(o, div_factor=0.5),
        r"1/div_factor must be at least 0 and at most 1, not 2\.0",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of")  # a scheduler's step before the optimizer's
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_server_can_not_follow_is_refused_with_what_it_can(make: Callable[[Torch], Any], words: str) -> None:
    optimizer = adamw(make_model())
    with pytest.raises(InvalidRequest, match=words) as refused:
        describe_optimizer(optimizer, "server", schedule=make(optimizer))
    assert "\n" not in str(refused.value)


def test_a_cosine_that_would_rise_is_refused() -> None:
    optimizer = simple(make_model())
    with pytest.raises(InvalidRequest, match=r"eta_min must be at least 0 and at most the learning rate, not 0\.5"):
        describe_optimizer(optimizer, "server", schedule=CosineAnnealingLR(optimizer, 10, eta_min=0.5))


@pytest.mark.parametrize(("params", "on"), [(simple, "worker"), (lambda m: m.named_parameters(), "server")])
def test_a_schedule_needs_an_optimizer_on_the_server(params: Callable[[Any], Any], on: Any) -> None:
    optimizer = params(make_model())
    scheduler = cosine(simple(make_model()))
    with pytest.raises(InvalidRequest, match="a worker's own optimizer takes its scheduler as in PyTorch"):
        describe_optimizer(optimizer, on, schedule=scheduler)


def test_a_scheduler_that_was_not_handed_over_is_named_before_the_worker_joins() -> None:
    """OneCycleLR has divided the rate by 25 already: the run would train with that."""
    optimizer = simple(make_model())
    one_cycle(optimizer)
    with pytest.raises(InvalidRequest, match=r"hand it over, as Optimizer\(\.\.\., schedule=scheduler\)"):
        describe_optimizer(optimizer, "server")


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_loop_that_steps_a_schedule_of_the_servers_is_told_to_delete_the_line() -> None:
    """At once, although this scheduler changes no rate for a thousand steps."""
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        model = make_model()
        inner = simple(model)
        scheduler = StepLR(inner, step_size=1000)
        optimizer = Optimizer(inner, session, on="server", schedule=scheduler)
        with pytest.raises(InvalidRequest, match=r"delete scheduler\.step\(\): the server steps this schedule"):
            train(model, optimizer, 3, scheduler)
        assert version(live) == 1


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("on_inner", [False, True])
def test_a_scheduler_made_after_the_optimizer_is_told_of_schedule(on_inner: bool) -> None:
    """At the first step, not after the many that this scheduler leaves the rate as it is."""
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        model = make_model()
        optimizer = Optimizer(adamw(model), session)
        scheduler = StepLR(optimizer.inner if on_inner and optimizer.inner is not None else optimizer, step_size=1000)
        with pytest.raises(InvalidRequest, match=r"a scheduler was made here: delete .* hand .* over, as .*schedule=.*worker"):
            train(model, optimizer, 1, scheduler)
