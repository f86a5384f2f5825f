"""Who makes the steps of an optimizer if `Optimizer` is not told: the server, if it makes the same ones; else the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from client.brought_helpers import PLAIN, adamw, assert_close, groups, make_model, simple, train
from gem_api.errors import InvalidRequest
from gem_client import connect
from gem_client.torch import Optimizer
from kit.server import config, serving
from torch import nn
from torch.optim.lr_scheduler import StepLR

Make = Callable[[nn.Module], torch.optim.Optimizer]


class OtherAdamW(torch.optim.AdamW):
    """As another library's would be: of the same name, and with steps of its own."""


OtherAdamW.__name__ = "AdamW"


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    StepLR(optimizer, step_size=10)
    return optimizer


def begun(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    train(model, optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("make", "who", "why"),
    [
        (adamw, "adamw", "the server makes all workers' steps, with one AdamW"),
        (lambda m: torch.optim.Adam(m.parameters()), "adam", "with one Adam"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "worker", "its SGD itself: the server's rule adds a momentum"),
        (lambda m: torch.optim.RMSprop(m.parameters()), "worker", "it is neither PyTorch's Adam nor its AdamW"),
        (lambda m: OtherAdamW(m.named_parameters()), "worker", "it is neither PyTorch's Adam nor its AdamW"),
        (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), "worker", "the server has no amsgrad=True"),
        (scheduled, "worker", "a scheduler was made on this optimizer"),
        (begun, "worker", "it has made steps already"),
    ],
)
def test_the_server_makes_the_steps_if_it_can_make_the_same(
    make: Make, who: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gem_client")
    ours, theirs = make_model(), make_model()
    inner, plain = make(ours), make(theirs)
    train(theirs, plain, 10)
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        train(ours, Optimizer(inner, session), 10)
        assert live.server.core.settings.optimizer == who
    assert_close(ours, theirs)
    assert why in caplog.text


def test_a_worker_that_keeps_its_scheduler_is_told_why_a_run_on_the_server_refuses_it() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, name="ann") as ann, connect(live.address, name="bob") as bob:
        Optimizer(adamw(make_model()), ann)
        with pytest.raises(InvalidRequest, match=r"This worker did not offer that: a scheduler was made .*schedule=scheduler"):
            Optimizer(scheduled(make_model()), bob)


@pytest.mark.parametrize("settings", [{"local_steps": 3}, {"rule": "diloco"}, {"optimizer": "worker"}])
def test_in_a_run_of_workers_own_steps_a_worker_makes_its_own(
    settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Also if its optimizer has parameter groups, which the layout of such a run does not know."""
    caplog.set_level(logging.INFO, "gem_client")
    started = config(replace(PLAIN, **settings), given=frozenset(settings))  # type: ignore[arg-type]
    with serving(started) as live, connect(live.address, name="ann") as ann, connect(live.address, name="bob") as bob:
        Optimizer(torch.optim.RMSprop(groups(make_model())), ann)
        train(model := make_model(), Optimizer(adamw(model), bob), 3)
        assert live.server.core.settings.optimizer == "worker"
        assert live.server.core.settings.learning_rate == PLAIN.learning_rate
    assert "this worker makes the steps of its AdamW" in caplog.text


def test_a_worker_that_can_not_follow_is_told_what_the_run_has() -> None:
    with serving(config(PLAIN)) as live, connect(live.address, name="ann") as ann, connect(live.address, name="bob") as bob:
        Optimizer(simple(make_model()), ann)
        with pytest.raises(InvalidRequest, match="this run has adamw on the server, for all workers"):
            Optimizer(torch.optim.RMSprop(make_model().named_parameters()), bob)
        faster = torch.optim.AdamW(make_model().named_parameters(), lr=0.02)
        with pytest.raises(InvalidRequest, match=r"the first worker brought --learning-rate 0\.01, and this one brings 0\.02"):
            Optimizer(faster, bob)
        assert len(live.server.core.leases.live) == 1
