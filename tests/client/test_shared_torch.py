"""The PyTorch optimizer with memory shared with the server: parameters are copied from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from client.torch_helpers import flat, flat_tensors, network, take_step, training
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, connect
from gem_client.torch import Optimizer
from kit.model import Patience, theta, version
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving, wait_until
from torch import nn

pytestmark = linux_only

RATE = 0.1
PLAIN = Hyperparameters(rule="downpour", learning_rate=RATE)


@pytest.fixture
def live() -> Iterator[Live]:
    """A server that shares memory, whose rule is plain SGD."""
    with serving(config(PLAIN, memory_socket=abstract())) as server:
        yield server


def test_the_gradients_are_put_together_in_the_region(live: Live) -> None:
    model = network()
    with training(live, model) as (optimizer, session):
        take_step(model, optimizer, 0)
        np.testing.assert_array_equal(
            session.gradient, flat_tensors(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        )


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "network"])
def test_the_parameters_stay_where_they_are_and_views_of_them_follow(shared: bool, live: Live) -> None:
    """Whoever relies on their memory (a view, a forked child, another process) sees what any optimizer would do to it."""
    model = network()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    view = model[0].weight.t()  # type: ignore[index]
    with training(live, model, shared_memory=shared) as (optimizer, _):
        take_step(model, optimizer, 0)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert torch.equal(view, model[0].weight.t())  # type: ignore[index]
        np.testing.assert_array_equal(flat(model), theta(live))


# -- what the user does to the parameters


def trained(settings: Hyperparameters, shared: bool, between: Callable[[nn.Module], None]) -> list[bytes]:
    """The bits of two workers' parameters after each of their steps, taken in turns, each once the commit is applied."""
    seen: list[bytes] = []
    with serving(config(settings, memory_socket=abstract())) as live, ExitStack() as stack:
        models = [network(seed=1), network(seed=2)]
        sessions = [stack.enter_context(connect(live.address, shared_memory=shared)) for _ in models]
        optimizers = [Optimizer(model.named_parameters(), session) for model, session in zip(models, sessions, strict=True)]
        assert all(session.shares_memory == shared for session in sessions)
        for step in range(12):
            for model, optimizer in zip(models, optimizers, strict=True):
                take_step(model, optimizer, step)
                wait_until(lambda: version(live) == len(seen) + 1, "the commit to be applied")
                seen.append(flat(model).tobytes())
                between(model)
    return seen


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def overwrite(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
            parameter.copy_(torch.zeros_like(parameter))


def load(model: nn.Module) -> None:
    model.load_state_dict(network(seed=9).state_dict())


def replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)


def share(model: nn.Module) -> None:
    model.share_memory()


def share_copies(model: nn.Module) -> None:
    """Moves the storage that a parameter's memory belongs to, and the parameter with it, as sending it to a process does."""
    for tensor in model.state_dict().values():
        tensor.untyped_storage().share_memory_()


def convert(model: nn.Module) -> None:
    model.bfloat16().float()


@pytest.mark.parametrize("change", [clamp, overwrite, load, replace_data])
def test_a_change_that_the_next_step_would_undo_is_refused(change: Callable[[nn.Module], None], live: Live) -> None:
    model = network()
    with training(live, model) as (optimizer, _):
        change(model)
        with pytest.raises(InvalidRequest, match=r"parameter '0\.weight' was changed since .* project="):
            take_step(model, optimizer, 0)


@pytest.mark.parametrize("change", [share, share_copies, convert])
def test_what_the_user_does_to_the_parameters_is_gone_with_the_next_step_as_it_is_over_the_network(
    change: Callable[[nn.Module], None],
) -> None:
    """The gradient is computed on what the user made of them; θ itself is untouched."""
    settings = Hyperparameters(learning_rate=RATE)
    assert trained(settings, True, change) == trained(settings, False, change)


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_may_be_given_another_dtype_after_the_optimizer(shared: bool, live: Live) -> None:
    model = network()
    with training(live, model, shared_memory=shared) as (optimizer, session):
        assert session.shares_memory == shared
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            model.to(dtype)
            optimizer.zero_grad()
            model(torch.ones(3, 4, dtype=dtype)).sum().backward()
            optimizer.step()
            assert {parameter.dtype for parameter in model.parameters()} == {dtype}
            np.testing.assert_array_equal(flat(model), torch.from_numpy(theta(live)).to(dtype).float().numpy())
        assert version(live) == 3


# -- when the buffers change


@pytest.mark.parametrize("shared_after", [True, False])
def test_after_a_restart_the_parameters_follow_the_server(shared_after: bool, tmp_path: Path) -> None:
    model = network()
    with serving(config(PLAIN, checkpoint_dir=tmp_path, memory_socket=abstract())) as live:
        session = connect(live.address, retry=Patience().retry())
        optimizer = Optimizer(model.named_parameters(), session)
        take_step(model, optimizer, 0)
        live.stop()
    again = replace(live.config, listen=live.address, resume=True, memory_socket=abstract() if shared_after else "")
    with serving(again) as back, session:
        for step in range(1, 4):
            take_step(model, optimizer, step)
            assert optimizer.answer is not None
            assert (optimizer.answer.dropped, optimizer.answer.version) == (False, step + 1)
            np.testing.assert_array_equal(flat(model), theta(back))
        assert session.shares_memory == shared_after
