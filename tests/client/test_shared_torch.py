"""The PyTorch optimizer with memory shared with the server: parameters are copied from it, or live in it if asked to."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from client.torch_helpers import flat, flat_tensors, loss_of, network, take_step, training
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, NonFiniteGradient, Session, connect
from gem_client.torch import Optimizer
from kit.model import Patience, expire_all, theta, version
from kit.regions import abstract, linux_only, region_at, until_held
from kit.server import Live, config, serving, wait_until
from torch import Tensor, nn

pytestmark = linux_only

RATE = 0.1
PLAIN = Hyperparameters(rule="downpour", learning_rate=RATE)


@pytest.fixture
def live() -> Iterator[Live]:
    """A server that shares memory, whose rule is plain SGD."""
    with serving(config(PLAIN, memory_socket=abstract())) as server:
        yield server


def lives_in(parameter: Tensor, session: Session) -> bool:
    """Whether a parameter's memory is part of the session's θ."""
    begin = session.theta.ctypes.data
    return begin <= parameter.data_ptr() < begin + session.theta.nbytes


def assert_lives_in(model: nn.Module, session: Session) -> None:
    """Every parameter lies in the session's θ, one after the other."""
    at = session.theta.ctypes.data
    for parameter in model.parameters():
        assert parameter.data_ptr() == at
        at += 4 * parameter.numel()
    assert at == session.theta.ctypes.data + session.theta.nbytes


# -- where parameters live


def test_the_parameters_live_in_the_region_from_the_start_and_stay_there(live: Live) -> None:
    model = network()
    kept = list(model.parameters())
    with training(live, model, in_place=True) as (optimizer, session):
        assert session.shares_memory
        for step in range(3):
            assert_lives_in(model, session)
            assert all(before is now for before, now in zip(kept, model.parameters(), strict=True))
            take_step(model, optimizer, step)
            np.testing.assert_array_equal(flat(model), theta(live))


def test_the_gradients_are_put_together_in_the_region(live: Live) -> None:
    model = network()
    with training(live, model) as (optimizer, session):
        take_step(model, optimizer, 0)
        np.testing.assert_array_equal(
            session.gradient, flat_tensors(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        )


def test_a_second_worker_starts_from_the_servers_theta(live: Live) -> None:
    first, second = network(seed=1), network(seed=2)
    with training(live, first) as (optimizer, _):
        take_step(first, optimizer, 0)
        with training(live, second, in_place=True) as (_, session):
            assert_lives_in(second, session)
            np.testing.assert_array_equal(flat(second), theta(live))


@pytest.mark.parametrize("settings", [{}, {"in_place": True, "shared_memory": False}], ids=["shared", "network"])
def test_the_parameters_stay_where_they_are_and_views_of_them_follow(settings: dict[str, Any], live: Live) -> None:
    """Whoever relies on their memory (a view, a forked child, another process) sees what any optimizer would do to it."""
    model = network()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    view = model[0].weight.t()  # type: ignore[index]
    with training(live, model, **settings) as (optimizer, _):
        take_step(model, optimizer, 0)
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert torch.equal(view, model[0].weight.t())  # type: ignore[index]
        np.testing.assert_array_equal(flat(model), theta(live))


# -- what the user does to the parameters


def trained(
    settings: Hyperparameters,
    shared: bool,
    between: Callable[[nn.Module], None],
    in_place: bool = False,
) -> list[bytes]:
    """The bits of two workers' parameters after each of their steps, taken in turns, each once the commit is applied."""
    seen: list[bytes] = []
    with serving(config(settings, memory_socket=abstract())) as live, ExitStack() as stack:
        models = [network(seed=1), network(seed=2)]
        sessions = [stack.enter_context(connect(live.address, shared_memory=shared)) for _ in models]
        optimizers = [
            Optimizer(model.named_parameters(), session, in_place=in_place)
            for model, session in zip(models, sessions, strict=True)
        ]
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
    over_the_network = trained(settings, False, change)
    assert trained(settings, True, change) == over_the_network
    assert trained(settings, True, change, in_place=True) == over_the_network


def test_a_gradient_that_is_no_number_is_refused_and_the_next_step_goes_through(live: Live) -> None:
    model = network()
    with training(live, model, in_place=True) as (optimizer, session):
        take_step(model, optimizer, 0)
        before = flat(model)
        model[0].weight.grad[0, 0] = float("nan")  # type: ignore[index]
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        np.testing.assert_array_equal(flat(model), before)
        np.testing.assert_array_equal(theta(live), before)
        take_step(model, optimizer, 1)
        assert_lives_in(model, session)
        np.testing.assert_array_equal(flat(model), theta(live))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_model_may_be_given_another_dtype_after_the_optimizer(shared: bool, in_place: bool, live: Live) -> None:
    model = network()
    with training(live, model, in_place=in_place, shared_memory=shared) as (optimizer, session):
        assert session.shares_memory == shared
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            model.to(dtype)
            optimizer.zero_grad()
            model(torch.ones(3, 4, dtype=dtype)).sum().backward()
            optimizer.step()
            assert {parameter.dtype for parameter in model.parameters()} == {dtype}
            np.testing.assert_array_equal(flat(model), torch.from_numpy(theta(live)).to(dtype).float().numpy())
        assert version(live) == 3


# -- what can not be moved


def halves() -> list[nn.Parameter]:
    """Two parameters over one storage."""
    storage = torch.arange(8.0)
    return [nn.Parameter(storage[:4]), nn.Parameter(storage[4:])]


def beside_a_frozen_one() -> list[nn.Parameter]:
    """A trained parameter and a frozen one over the same elements."""
    storage = torch.arange(4.0)
    return [nn.Parameter(storage), nn.Parameter(storage, requires_grad=False)]


def in_torchs_shared_memory() -> list[nn.Parameter]:
    """One that other processes may map, as after `model.share_memory()`."""
    return [nn.Parameter(torch.arange(4.0).share_memory_())]


STUCK: dict[str, Callable[[], list[nn.Parameter]]] = {
    "float64": lambda: [nn.Parameter(torch.arange(4.0, dtype=torch.float64))],
    "float16": lambda: [nn.Parameter(torch.arange(4.0, dtype=torch.float16))],
    "bfloat16": lambda: [nn.Parameter(torch.arange(4.0, dtype=torch.bfloat16))],
    "transposed": lambda: [nn.Parameter(torch.arange(6.0).view(2, 3).t())],
    "every other element": lambda: [nn.Parameter(torch.arange(8.0)[::2])],
    "part of something larger": lambda: [nn.Parameter(torch.arange(8.0)[2:6])],
    "expanded": lambda: [nn.Parameter(torch.zeros(1, 4).expand(3, 4).contiguous()[1:])],
    "halves of one storage": halves,
    "the elements of a frozen one": beside_a_frozen_one,
    "torch's own shared memory": in_torchs_shared_memory,
}


@pytest.mark.parametrize("kind", STUCK)
def test_a_parameter_whose_memory_others_rely_on_is_copied_not_moved(kind: str, live: Live) -> None:
    parameters = STUCK[kind]()
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    storage, place = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    with connect(live.address) as session:
        named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
        optimizer = Optimizer(named, session, in_place=True)
        assert session.shares_memory
        for _ in range(2):
            for parameter in trainable:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert parameters[0].data_ptr() == place
            assert {parameter.untyped_storage().data_ptr() for parameter in parameters} == {storage}
            last = trainable[-1]
            np.testing.assert_allclose(flat_tensors([last]), theta(live)[-last.numel() :], rtol=1e-2)


def test_parameters_that_can_be_moved_are_beside_ones_that_can_not(live: Live) -> None:
    movable, stuck = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    with connect(live.address) as session:
        alone = nn.Parameter(torch.tensor(1.0))
        optimizer = Optimizer([("a", movable), ("b", stuck), ("c", alone)], session, in_place=True)
        for parameter in (movable, stuck, alone):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert [lives_in(parameter, session) for parameter in (movable, stuck, alone)] == [True, False, True]
        np.testing.assert_allclose(theta(live), np.full(9, 0.9), rtol=1e-6)
        np.testing.assert_allclose(flat_tensors([movable, stuck, alone]), theta(live), rtol=1e-6)


def test_a_tied_weight_stays_tied(live: Live) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with training(live, model, in_place=True) as (optimizer, session):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert model[1].weight is model[0].weight
        assert_lives_in(model, session)


# -- when the buffers change


def test_after_the_loss_of_a_lease_the_parameters_follow_to_the_new_region(live: Live) -> None:
    model, other = network(), network()
    with training(live, model, in_place=True) as (optimizer, session):
        take_step(model, optimizer, 0)
        old = region_at(session.theta)
        expire_all(live)
        with training(live, other) as (second, _):
            take_step(other, second, 1)
        take_step(model, optimizer, 2)
        assert optimizer.answer is not None
        assert (optimizer.answer.dropped, session.generation) == (True, 2)
        assert_lives_in(model, session)
        np.testing.assert_array_equal(flat(model), theta(live))
        until_held(old, 0)
        take_step(model, optimizer, 3)
        assert not optimizer.answer.dropped
        np.testing.assert_array_equal(flat(model), theta(live))
        np.testing.assert_array_equal(
            session.gradient, flat_tensors(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        )


@pytest.mark.parametrize("shared_after", [True, False])
def test_after_a_restart_the_parameters_follow_the_server(shared_after: bool, tmp_path: Path) -> None:
    model = network()
    with serving(config(PLAIN, checkpoint_dir=tmp_path, memory_socket=abstract())) as live:
        session = connect(live.address, retry=Patience().retry())
        optimizer = Optimizer(model.named_parameters(), session, in_place=True)
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
        if shared_after:
            assert_lives_in(model, session)


def test_the_model_can_be_used_after_the_session_is_closed(live: Live) -> None:
    model = network()
    with training(live, model, in_place=True) as (optimizer, _):
        take_step(model, optimizer, 0)
    np.testing.assert_array_equal(flat(model), theta(live))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 1).backward()
    sgd.step()
    assert not np.array_equal(flat(model), theta(live))


def test_a_model_that_was_used_before_can_join_again(live: Live) -> None:
    model = network()
    for step in range(3):
        with training(live, model, in_place=True) as (optimizer, session):
            take_step(model, optimizer, step)
            assert session.shares_memory
            np.testing.assert_array_equal(flat(model), theta(live))


# -- what people do with models


def test_a_copy_of_the_model_is_a_copy(live: Live) -> None:
    model = network()
    with training(live, model, in_place=True) as (optimizer, _):
        take_step(model, optimizer, 0)
        twin = copy.deepcopy(model)
        before = flat(twin)
        take_step(model, optimizer, 1)
        np.testing.assert_array_equal(flat(twin), before)


def saved(model: nn.Module) -> int:
    """How many bytes a model takes in a file of PyTorch's."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def test_the_model_can_be_saved_in_every_usual_way(live: Live, tmp_path: Path) -> None:
    model = network()
    with training(live, model, in_place=True) as (optimizer, _):
        take_step(model, optimizer, 0)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        safetensors.torch.save_model(model, str(tmp_path / "whole.safetensors"))
        expected = flat(model)
    for name in ("model.safetensors", "whole.safetensors"):
        again = network(seed=5)
        again.load_state_dict(safetensors.torch.load_file(tmp_path / name))
        np.testing.assert_array_equal(flat(again), expected)
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    np.testing.assert_array_equal(flat(again), expected)


def test_a_part_of_the_model_takes_no_more_than_itself_in_a_file(live: Live) -> None:
    """PyTorch writes the whole memory that a tensor is a part of."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(300, 300))
    alone = saved(model[0])
    with training(live, model, in_place=True):
        assert saved(model[0]) < 2 * alone
