"""Habits from PyTorch that mean something else here: each is refused, or works as docs/guides/own-loop.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from client.brought_helpers import INPUTS, PLAIN, adamw, assert_close, make_model, simple, train
from gem_client import InvalidRequest, LayoutMismatch, connect
from gem_client.torch import Optimizer
from gem_client.torch.watch import CERTAIN_STEPS
from kit.model import theta, version
from kit.server import Live, config, serving
from torch import nn

BRING: dict[str, Callable[..., Any]] = {
    "parameters": lambda model: model.named_parameters(),
    "own optimizer": adamw,
}
each_way = pytest.mark.parametrize("bring", BRING.values(), ids=BRING)


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(config(PLAIN)) as server:
        yield server


@contextmanager
def worker(live: Live, model: nn.Module, bring: Any = BRING["parameters"], **options: Any) -> Iterator[Optimizer]:
    with connect(live.address) as session:
        yield Optimizer(bring(model), session, **options)


def first_layer(model: nn.Module) -> Any:
    return next(model.children())


def frozen_first() -> nn.Module:
    """A model whose first layer is frozen."""
    model = make_model()
    first_layer(model).requires_grad_(False)
    return model


# -- which parameters are trained


@each_way
def test_a_layer_that_is_unfrozen_later_is_refused_and_the_error_says_how(bring: Any, live: Live) -> None:
    model = frozen_first()
    with worker(live, model, bring) as optimizer:
        train(model, optimizer, 2)
        first_layer(model).requires_grad_(True)
        with pytest.raises(InvalidRequest, match=r"'0\.weight' has a gradient, but was frozen .*requires_grad_\(False\)"):
            train(model, optimizer, 1)
        assert version(live) == 2


@each_way
def test_a_layer_that_is_frozen_later_waits_and_is_trained_after_that(bring: Any, live: Live) -> None:
    model = make_model()
    with worker(live, model, bring, on="worker") as optimizer:
        first_layer(model).requires_grad_(False)
        first_value = first_layer(model).weight.clone()
        train(model, optimizer, 3)
        assert torch.equal(first_layer(model).weight, first_value)
        first_layer(model).requires_grad_(True)
        train(model, optimizer, 3)
        assert not torch.equal(first_layer(model).weight, first_value)


@pytest.mark.parametrize("on", ["worker", "server"])
def test_a_group_that_is_added_to_the_inner_optimizer_is_refused(on: Any, live: Live) -> None:
    model = make_model()
    with worker(live, model, simple, on=on) as optimizer:
        assert optimizer.inner is not None
        optimizer.inner.add_param_group({"params": [("new", nn.Parameter(torch.zeros(2)))]})
        with pytest.raises(InvalidRequest, match="the run's tensors are fixed"):
            train(model, optimizer, 1)


# -- changes between two steps


@each_way
def test_weights_that_are_loaded_after_the_optimizer_was_made_are_refused(bring: Any, live: Live) -> None:
    model = make_model()
    with worker(live, model, bring) as optimizer:
        before = theta(live)
        model.load_state_dict({name: tensor + 100 for name, tensor in model.state_dict().items()})
        with pytest.raises(InvalidRequest, match="load weights before you make the Optimizer"):
            train(model, optimizer, 1)
        assert (theta(live) == before).all()


@each_way
@pytest.mark.parametrize("change", ["in place", ".data", "other memory"])
def test_a_change_after_each_step_is_refused(change: str, bring: Any, live: Live) -> None:
    """In place it is seen at any step; through `.data`, which leaves no trace, in the first ones."""
    model = make_model()
    with worker(live, model, bring) as optimizer, torch.no_grad():
        if change == "in place":
            with torch.enable_grad():
                train(model, optimizer, CERTAIN_STEPS + 1)
        for parameter in model.parameters():
            if change == "other memory":
                parameter.data = torch.zeros_like(parameter)
            else:
                (parameter if change == "in place" else parameter.data).clamp_(-0.01, 0.01)
        with torch.enable_grad(), pytest.raises(InvalidRequest, match=r"was changed since the last step.* project="):
            train(model, optimizer, 1)


def test_values_that_are_swapped_out_and_in_again_are_no_change(live: Live) -> None:
    """As for an evaluation on averaged weights."""
    model = make_model()
    with worker(live, model) as optimizer:
        for _ in range(CERTAIN_STEPS + 2):
            train(model, optimizer, 1)
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict({name: tensor * 2 for name, tensor in kept.items()})
            model.load_state_dict(kept)
        optimizer.finish()
        optimizer.load_final()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_way
def test_values_that_are_perturbed_and_put_back_by_arithmetic_are_no_change(bring: Any, dtype: Any, live: Live) -> None:
    """As in SAM by hand, or MeZO: what comes back is rounded. The step loads θ, so the end is exact again."""
    model = make_model().to(dtype)
    with worker(live, model, bring) as optimizer:
        for _ in range(CERTAIN_STEPS + 2):
            noise = [torch.randn_like(parameter) * 0.05 for parameter in model.parameters()]
            for sign in (1, -2, 1):
                with torch.no_grad():
                    for parameter, change in zip(model.parameters(), noise, strict=True):
                        parameter.add_(change, alpha=sign)
            optimizer.zero_grad()
            model(INPUTS.to(dtype)).square().mean().backward()
            optimizer.step()
        optimizer.load_final()


@pytest.mark.parametrize("projected", [True, False])
def test_an_embedding_with_max_norm_needs_a_projection_which_it_may_round_anew(projected: bool, live: Live) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(20, 8, max_norm=1.0)
    indices = torch.arange(20)

    def project() -> None:
        embedding.weight.copy_(torch.renorm(embedding.weight, 2, 0, 1.0))

    def steps(optimizer: Optimizer) -> None:
        for _ in range(30):
            optimizer.zero_grad()
            (embedding(indices) - 1).square().mean().backward()
            optimizer.step()

    with worker(live, embedding, simple, project=project if projected else None) as optimizer:
        if projected:
            steps(optimizer)
            embedding(indices)  # an evaluation, which may round them too
            optimizer.load_final()
        else:
            with pytest.raises(InvalidRequest, match="max_norm= of an Embedding, as project="):
                steps(optimizer)


# -- steps that no commit has


CLAMP = {"project": lambda: None}
ENDS = {
    "worker": ("worker", 1, {}),
    "windows": ("worker", 3, {}),
    "projected": ("worker", 1, CLAMP),
    "server": ("server", 1, {}),
    "overlap": ("server", 1, {"overlap": True}),
}


@pytest.mark.parametrize(("before", "end"), [(0, Optimizer.finish), (6, Optimizer.load_final)])
@pytest.mark.parametrize(("on", "local_steps", "options"), ENDS.values(), ids=ENDS)
def test_steps_of_the_inner_optimizer_are_refused_at_the_end_and_not_undone(
    end: Callable[[Optimizer], None], before: int, on: Any, local_steps: int, options: dict[str, Any]
) -> None:
    """They are never committed: loading θ would lose the training without a word."""
    with serving(config(replace(PLAIN, local_steps=local_steps))) as live:
        model = make_model()
        with worker(live, model, simple, on=on, **options) as optimizer:
            train(model, optimizer, before)
            if before:
                optimizer.finish()
            committed = theta(live)
            train(model, optimizer.inner, 2)
            trained = [parameter.detach().clone() for parameter in model.parameters()]
            with pytest.raises(
                InvalidRequest, match=r"no commit has it.* the Optimizer's own step\(\) \(for SAM step\(closure\)"
            ):
                end(optimizer)
            assert all(torch.equal(parameter, kept) for parameter, kept in zip(model.parameters(), trained, strict=True))
            assert (theta(live) == committed).all()


@each_way
def test_a_step_too_small_for_bfloat16_is_seen_too(bring: Any, live: Live) -> None:
    model = make_model()
    with worker(live, model, bring) as optimizer:
        with torch.no_grad():
            first_layer(model).weight[0, 0] *= 1 + 1e-6
        with pytest.raises(InvalidRequest, match=r"'0\.weight' was changed"):
            optimizer.load_final()


@each_way
def test_weights_that_are_loaded_after_the_end_stay_and_so_do_statistics(bring: Any, live: Live) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(1))
    with worker(live, model, bring if bring is BRING["parameters"] else simple) as optimizer:
        train(model, optimizer, 2)
        model(INPUTS)  # BatchNorm's statistics are no parameters
        optimizer.load_final()
        best = {name: torch.full_like(tensor, 2) for name, tensor in model.state_dict().items()}
        model.load_state_dict(best)
    assert all(torch.equal(tensor, best[name]) for name, tensor in model.state_dict().items())


# -- changes between two steps that can't be compared


def test_a_change_that_cannot_be_compared_is_logged_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """With overlap the θ that the parameters were loaded from is gone."""
    model = make_model()
    with worker(live, model, overlap=True) as optimizer:
        for _ in range(3):
            train(model, optimizer, 1)
            with torch.no_grad():
                first_layer(model).weight.clamp_(-0.01, 0.01)
        optimizer.finish()
    assert [record.message.count("'0.weight' was changed") for record in caplog.records].count(1) == 1


@pytest.mark.parametrize(("bring", "local_steps"), [("parameters", 1), ("own optimizer", 1), ("own optimizer", 3)])
def test_a_projection_holds_after_each_step_and_in_the_final_model(bring: str, local_steps: int) -> None:
    with serving(config(replace(PLAIN, local_steps=local_steps))) as live:
        model = make_model()

        def clamp() -> None:
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)

        with worker(live, model, BRING[bring], project=clamp) as optimizer:
            for _ in range(7):
                train(model, optimizer, 1)
                assert max(float(parameter.detach().abs().max()) for parameter in model.parameters()) <= 0.01
            optimizer.load_final()
            assert float(model(INPUTS).detach().abs().max()) <= 0.06


def test_a_run_begins_in_the_set_that_it_is_projected_on(live: Live) -> None:
    """A weight that begins outside would stay at the edge until θ has come all the way back."""
    model = make_model()

    def clamp() -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)

    with worker(live, model, simple, on="worker", project=clamp) as optimizer:
        assert abs(theta(live)).max() <= 0.01
        train(model, optimizer, 3)
        assert abs(theta(live)).max() <= 0.01001, "one worker's steps end in the set"


def test_a_clamp_in_a_hook_of_the_workers_own_optimizer_trains_as_alone(live: Live) -> None:
    """The commit holds what the clamp did: no lazy projection, and no clamp before the first step."""

    def clamped(model: nn.Module) -> Any:
        inner = simple(model)
        inner.register_step_post_hook(lambda *_: [parameter.data.clamp_(-0.1, 0.1) for parameter in model.parameters()])
        return inner

    alone, model = make_model(), make_model()
    train(alone, clamped(alone), 20)
    with worker(live, model, clamped, on="worker") as optimizer:
        train(model, optimizer, 20)
        assert abs(theta(live)).max() <= 0.1001
    assert_close(model, alone)


# -- frozen parameters of several workers


def test_workers_with_other_frozen_values_are_refused_while_one_with_the_first_is_there(live: Live) -> None:
    other = frozen_first()
    with torch.no_grad():
        first_layer(other).weight[1, 1] += 0.22
    with worker(live, frozen_first()) as optimizer:
        with worker(live, frozen_first().bfloat16()):
            pass  # the same weights in a shorter format
        with (
            pytest.raises(LayoutMismatch, match="other values than those of worker"),
            worker(live, other),
        ):
            pass
        optimizer.load_final()
    with worker(live, other):
        pass  # nobody is left to disagree


def test_frozen_values_that_are_not_known_or_its_own_from_before_refuse_no_worker(live: Live) -> None:
    model = {"w": [0.0]}
    with connect(live.address, name="ann") as ann, connect(live.address) as other, connect(live.address, name="ann") as again:
        ann.join(model, frozen=b"1")
        other.join(model)
        again.join(model, frozen=b"2")
