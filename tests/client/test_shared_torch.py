"""The PyTorch optimizer with memory shared with the server: parameters are copied from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from client.torch_helpers import flat, flat_tensors, network, take_step, training
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_client.torch import Optimizer
from kit.model import Patience, theta, version
from kit.regions import abstract, linux_only
from kit.server import Live, config, serving

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
            assert (optimizer.answer.lost, optimizer.answer.version) == (False, step + 1)
            np.testing.assert_array_equal(flat(model), theta(back))
        assert session.shares_memory == shared_after
