"""Optimizers that are not PyTorch's own: wrappers and the like are trained with, or refused before the worker joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from client.brought_helpers import PLAIN, assert_close, make_model, train
from gem_client import InvalidRequest, NonFiniteGradient, connect
from gem_client.torch import Optimizer
from kit.model import version
from kit.server import Live, config, serving
from torch import nn


class Wrapper(torch.optim.Optimizer):
    """As Lookahead and others: a subclass that leaves out `super().__init__()`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Duck:
    """An optimizer by its interface alone, which holds another in a list."""

    def __init__(self, inner: Any) -> None:
        self._held, self.cleared = [inner], 0

    @property
    def param_groups(self) -> Any:
        return self._held[0].param_groups

    def zero_grad(self) -> None:
        self.cleared += 1
        self._held[0].zero_grad()

    def step(self, closure: Any = None) -> Any:
        return self._held[0].step(closure)

    def state_dict(self) -> Any:
        return self._held[0].state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._held[0].load_state_dict(state_dict)


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


WRAPPERS: dict[str, Callable[[Any], Any]] = {"subclass": Wrapper, "interface": Duck, "both": lambda inner: Duck(Wrapper(inner))}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_trains_as_without_a_server(wrap: Callable[[Any], Any]) -> None:
    """With its state saved and loaded, and a schedule on the Optimizer."""
    ours, theirs = make_model(), make_model()
    rival, inner = adamw(theirs), wrap(adamw(ours))
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        optimizer = Optimizer(inner, session, names=ours.named_parameters())
        for each, model in ((rival, theirs), (optimizer, ours)):
            train(model, each, 6)
            each.load_state_dict(each.state_dict())
            train(model, each, 6, torch.optim.lr_scheduler.StepLR(each, 2, 0.5))
        assert version(live) == 12
        assert getattr(inner, "cleared", 12) == 12
        optimizer.load_final()
    assert_close(ours, theirs)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_rejected_window_clears_the_state_inside_a_wrapper(wrap: Callable[[Any], Any]) -> None:
    model = make_model()
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        optimizer = Optimizer(wrap(adamw(model)), session, names=model.named_parameters())
        train(model, optimizer, 1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        train(model, optimizer, 2)
        assert version(live) == 3


class AcceleratedOptimizer(Wrapper):
    """Named as accelerate's."""


class ScheduleFree(torch.optim.SGD):
    """With the two methods by which schedule-free optimizers move between y and x."""

    def train(self) -> None: ...
    def eval(self) -> None: ...


class ScheduleFreeWrapper(Duck):
    def train(self) -> None: ...
    def eval(self) -> None: ...


def lacking(name: str) -> Any:
    return lambda model: type("Lacking", (Duck,), {name: None})(adamw(model))


def copies(model: nn.Module) -> Any:
    """Steps copies of the parameters, as optimizers for fp16 do, and lists the model's own."""
    inner = torch.optim.SGD([parameter.detach().clone() for parameter in model.parameters()])
    return type("Copies", (Duck,), {"param_groups": [{"params": list(model.parameters())}]})(inner)


LISTED = "param_groups of a Strange are not a list of groups"
REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "accelerate": (lambda model: AcceleratedOptimizer(adamw(model)), r"accelerator\.prepare\(Optimizer\(adamw, session\)\)"),
    "schedule-free": (lambda model: ScheduleFree(model.parameters()), r"a ScheduleFree evaluates other parameters .*AdamW"),
    "a wrapper of it": (lambda model: ScheduleFreeWrapper(adamw(model)), "a ScheduleFreeWrapper evaluates other parameters"),
    "wrapped": (lambda model: Wrapper(ScheduleFree(model.parameters())), "a ScheduleFree evaluates other parameters"),
    "no step": (lacking("step"), "a Lacking has no step: an optimizer needs param_groups, step, zero_grad, state_dict"),
    "no zero_grad": (lacking("zero_grad"), "a Lacking has no zero_grad: .* Give the optimizer inside it"),
    "no state_dict": (lacking("state_dict"), "a Lacking has no state_dict"),
    "no groups": (lambda model: type("Strange", (Duck,), {"param_groups": None})(adamw(model)), LISTED),
    "tensors": (lambda model: type("Strange", (Duck,), {"param_groups": list(model.parameters())})(adamw(model)), LISTED),
    "copies": (copies, "a Copies steps parameters that its param_groups do not list.* a SGD"),
    "a class": (lambda model: torch.optim.SGD, r"not its class: Optimizer\(SGD\(model\.parameters\(\), \.\.\.\), session\)"),
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One server for all who are refused."""
    with serving(config(PLAIN)) as server:
        yield server


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_trained_with_is_refused_before_the_worker_joins(kind: str, live: Live) -> None:
    make, words = REFUSED[kind]
    model = make_model()
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match=words):
            Optimizer(make(model), session, names=model.named_parameters())
        assert not live.server.core.leases.live
        assert session.generation == 0
        optimizer = Optimizer(adamw(model), session, names=model.named_parameters())
        with pytest.raises(InvalidRequest, match="this Optimizer has joined a run already"):
            Optimizer(optimizer, session)


def test_a_wrapper_of_copies_of_the_parameters_is_seen_by_their_names(live: Live) -> None:
    """As of optimizers for fp16, whose groups hold copies in fp32."""
    model = make_model()
    wrapper = Duck(torch.optim.SGD([parameter.detach().clone().requires_grad_() for parameter in model.parameters()]))
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match=r"a Duck is not one of PyTorch's own.* add names=model\.named_parameters\(\)"):
            Optimizer(wrapper, session)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="names= has none of the parameters to train"):
            Optimizer(wrapper, session, names=model.named_parameters())  # type: ignore[arg-type]
        assert session.generation == 0


def test_a_group_whose_names_do_not_fit_its_parameters_needs_names() -> None:
    """As after a loop has taken frozen parameters out of the groups."""
    model = make_model()
    inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    del inner.param_groups[0]["params"][0]
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        with pytest.raises(InvalidRequest, match=r"has 3 parameters, but 4 names.*add names=model\.named_parameters\(\)"):
            Optimizer(inner, session)
        Optimizer(inner, session, names=model.named_parameters())
        assert [tensor.name for tensor in session.layout.tensors] == ["0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("load", [False, True], ids=["given", "loaded"])
def test_a_state_that_the_server_will_not_use_is_told(load: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    inner = adamw(model)
    train(model, inner, 1)
    with serving(config(PLAIN)) as live, connect(live.address) as session:
        saved = inner.state_dict()
        optimizer = Optimizer(adamw(model) if load else inner, session, on="server", names=model.named_parameters())
        if load:
            optimizer.load_state_dict(saved)
    assert [record.getMessage()[:70] for record in caplog.records if "is not used" in record.getMessage()] == [
        "the state that the optimizer has, such as its moments, is not used: wi"
    ]
