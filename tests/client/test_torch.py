"""The PyTorch optimizer against a real server."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from client.torch_helpers import flat, loss_of, network, training
from gem_api.hyperparameters import Hyperparameters
from gem_client import InvalidRequest, LayoutMismatch, NonFiniteGradient, Session, connect
from gem_client.torch import Optimizer
from gem_client.torch.parameters import require_apart
from kit.model import outcomes, theta, version
from kit.server import Live, config, serving
from torch import Tensor, nn

RATE = 0.1
PLAIN = Hyperparameters(rule="downpour", learning_rate=RATE)


@pytest.fixture
def plain() -> Iterator[Live]:
    """A server whose rule is plain SGD."""
    with serving(config(PLAIN)) as live:
        yield live


def names(session: Session) -> list[str]:
    return [tensor.name for tensor in session.layout.tensors]


# -- parameters and θ


def test_the_parameters_equal_theta_after_construction_and_each_step(live: Live) -> None:
    model = network()
    with training(live, model) as (optimizer, _):
        np.testing.assert_array_equal(flat(model), theta(live))
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            np.testing.assert_array_equal(flat(model), theta(live))
            assert optimizer.answer is not None
            assert optimizer.answer.version == step + 1


def test_a_later_worker_starts_from_the_runs_theta_not_from_its_own_values(live: Live) -> None:
    first, second = network(seed=1), network(seed=2)
    with training(live, first), training(live, second):
        np.testing.assert_array_equal(flat(second), flat(first))


def test_without_names_tensors_are_named_by_their_position(live: Live) -> None:
    with connect(live.address) as session:
        Optimizer(network().parameters(), session)
        assert names(session) == ["0", "1", "2", "3"]


def test_a_name_given_twice_is_refused_for_one_of_the_two_would_never_be_trained(live: Live) -> None:
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    with connect(live.address) as session:
        with pytest.raises(InvalidRequest, match=r"'weight'.*prefix"):
            Optimizer(chain(encoder.named_parameters(), decoder.named_parameters()), session)
        Optimizer(chain(encoder.named_parameters("encoder"), decoder.named_parameters("decoder")), session)
        assert names(session) == ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"]


def test_another_model_is_refused(live: Live) -> None:
    with training(live, network()), pytest.raises(LayoutMismatch), training(live, nn.Linear(2, 2)):
        pass


# -- kinds of parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_float_type_is_trained_on_a_float32_theta(
    plain: Live, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2, bias=False).to(dtype)
    first = model.weight.detach().float().clone()
    with training(plain, model) as (optimizer, _):
        model.weight.grad = torch.full((2, 3), 0.125, dtype=dtype)
        optimizer.step()
        held = theta(plain)
        assert held.dtype == np.float32
        np.testing.assert_allclose(held, first.reshape(-1).numpy() - RATE * 0.125, rtol=1e-6)
        assert model.weight.dtype == dtype
        expected = torch.from_numpy(held).view(2, 3).to(dtype)
        assert torch.equal(model.weight.detach(), expected)
    warned = any("1 parameters are float64, such as weight" in record.getMessage() for record in caplog.records)
    assert warned == (dtype == torch.float64)


def test_frozen_parameters_are_left_alone_and_out_of_the_layout(live: Live) -> None:
    model = network()
    frozen: Tensor = model[0].weight  # type: ignore[index]
    frozen.requires_grad_(False)
    before = frozen.clone()
    with training(live, model) as (optimizer, session):
        assert names(session) == ["0.bias", "2.weight", "2.bias"]
        loss_of(model, 0).backward()
        optimizer.step()
        assert torch.equal(frozen, before)
        np.testing.assert_array_equal(flat(model), theta(live))


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sum(self.two(self.one(inputs)), dim=1, keepdim=True)


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_a_tied_weight_counts_once_and_stays_tied(plain: Live, remove_duplicate: bool) -> None:
    model = Tied()
    first = model.one.weight.detach().clone()
    with connect(plain.address) as session:
        optimizer = Optimizer(model.named_parameters(remove_duplicate=remove_duplicate), session)
        assert names(session) == ["one.weight"]
        loss_of(model, 0).backward()
        gradient = model.one.weight.grad
        assert gradient is not None
        optimizer.step()
        assert model.two.weight is model.one.weight
        torch.testing.assert_close(model.one.weight.detach(), first - RATE * gradient)


ALONE: Callable[[Any], Any] = list
WITH_SGD: Callable[[Any], Any] = torch.optim.SGD


@pytest.mark.parametrize(("make", "settings"), [(ALONE, {}), (WITH_SGD, {"on": "server"})], ids=["alone", "server"])
def test_parameters_that_share_memory_are_refused_for_one_gradient_would_be_lost(
    plain: Live, make: Callable[[Any], Any], settings: dict[str, Any]
) -> None:
    memory = torch.ones(4, 4)

    def of(*views: Tensor) -> Any:
        return make([(str(view.shape), nn.Parameter(view)) for view in views])

    with connect(plain.address) as session:
        for views in [(memory, memory[1:2]), (memory, memory.view(2, 8)), (memory[:, :2], memory[:1, 0])]:
            with pytest.raises(InvalidRequest, match=r"share memory.*assigning the Parameter itself"):
                Optimizer(of(*views), session, **settings)
        Optimizer(of(memory[:2, :1], memory[2:], memory[:2, 2:], memory[:0]), session, **settings)


def test_10_000_parameters_are_compared_by_their_order_in_memory_not_pair_by_pair() -> None:
    require_apart({str(number): part for number, part in enumerate(torch.ones(10_000, 1).unbind())})


def test_the_names_of_a_compiled_model_are_those_of_the_plain_one(live: Live) -> None:
    compiled, plain = nn.Module(), network()
    compiled._orig_mod = nn.Sequential(nn.ModuleDict({"_orig_mod": plain}))
    with training(live, compiled) as (_, session):
        assert names(session) == [f"0.{name}" for name, _ in plain.named_parameters()]


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_optimizer_is_refused(live: Live, take: Callable[[Any], Any]) -> None:
    with training(live, network()) as (optimizer, _), pytest.raises(InvalidRequest, match="can't be copied or pickled"):
        take(optimizer)


def test_sparse_gradients_move_only_the_rows_that_were_used(plain: Live) -> None:
    model = nn.Embedding(6, 3, sparse=True)
    first = model.weight.detach().clone()
    with training(plain, model) as (optimizer, _):
        model(torch.tensor([1, 4, 4])).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse
        optimizer.step()
        expected = first - RATE * torch.tensor([0, 1, 0, 0, 2, 0])[:, None]
        torch.testing.assert_close(model.weight.detach(), expected)


def test_parameters_that_are_not_contiguous_or_one_number_keep_their_elements_in_place(plain: Live) -> None:
    parameter, number = nn.Parameter(torch.arange(6.0).view(2, 3).t()), nn.Parameter(torch.tensor(2.0))
    assert not parameter.is_contiguous()
    with connect(plain.address) as session:
        optimizer = Optimizer([("weight", parameter), ("scale", number)], session)
        np.testing.assert_array_equal(theta(plain), [0, 3, 1, 4, 2, 5, 2])
        parameter.grad, number.grad = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]), torch.tensor(1.0)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.tensor([[0.0, 2.9], [0.8, 3.7], [1.6, 4.5]]))
        assert number.item() == pytest.approx(1.9)


# -- steps


def test_a_closure_is_evaluated_and_its_loss_returned_and_reported(live: Live) -> None:
    model = network()
    with training(live, model) as (optimizer, _):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        expected = loss_of(model, 0).item()
        assert optimizer.step(closure).item() == expected
        assert reported_loss(live) == pytest.approx(expected)
        assert version(live) == 1


@pytest.mark.parametrize("make", [float, torch.tensor, lambda value: torch.tensor([value])], ids=["float", "0-d", "1-d"])
def test_a_loss_that_is_given_is_reported(live: Live, make: Callable[[float], Any]) -> None:
    model = network()
    with training(live, model) as (optimizer, _):
        loss_of(model, 0).backward()
        optimizer.step(loss=make(1.5))
        assert reported_loss(live) == 1.5


def reported_loss(live: Live) -> Any:
    """What the server knows of its only worker's loss."""
    return live.on_loop(lambda: next(iter(live.core.leases.live.values())).last_applied.loss)


def test_accumulated_gradients_are_one_commit_that_completes_several_batches(plain: Live) -> None:
    model = network()
    twin = copy.deepcopy(model)
    with training(plain, model, batches_per_step=2) as (optimizer, session):
        shards = iter(session.shards(12, batch_size=4))
        for step in range(2):
            next(shards)
            (loss_of(model, step) / 2).backward()
        optimizer.step()
        assert (version(plain), plain.on_loop(lambda: plain.core.samples_committed)) == (1, 8)
    sgd = torch.optim.SGD(twin.parameters(), lr=RATE)
    for step in range(2):
        (loss_of(twin, step) / 2).backward()
    sgd.step()
    np.testing.assert_allclose(flat(model), flat(twin), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_no_number_is_refused_and_the_next_step_goes_through(live: Live) -> None:
    model = network()
    with training(live, model) as (optimizer, _):
        loss_of(model, 0).backward()
        before = flat(model)
        model[0].weight.grad[0, 0] = float("nan")  # type: ignore[index]
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        np.testing.assert_array_equal(flat(model), before)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        assert outcomes(live) == {"applied": 1, "rejected": 1}


@pytest.mark.parametrize(("read", "overlap"), [(Session.read, True), (Session.pull, False)], ids=["read", "pull"])
def test_reading_theta_before_a_step_changes_neither_its_staleness_nor_its_pi(
    read: Callable[[Session], Any], overlap: bool
) -> None:
    def answered(look: Callable[[Session], Any]) -> tuple[Any, ...]:
        """What became of a gradient while others committed five, and the session looked at θ."""
        with serving(config(Hyperparameters(rule="gem"))) as live, connect(live.address) as session:
            parameter = nn.Parameter(torch.ones(9))
            optimizer = Optimizer([("w", parameter)], session, overlap=overlap)
            with connect(live.address) as other:
                other.join({"w": np.ones(9)})
                for _ in range(2):
                    parameter.grad = torch.ones(9)
                    optimizer.step()
                optimizer.finish()
                for _ in range(5):
                    other.commit(np.full(9, 0.1))
                look(session)
                optimizer.step()
                optimizer.finish()
            assert optimizer.answer is not None
            return optimizer.answer.staleness, optimizer.answer.pi_median, theta(live).tobytes()

    expected = answered(lambda session: None)
    assert expected[0] == 5
    assert answered(read) == expected


def test_a_parameter_group_added_later_is_refused(live: Live) -> None:
    with training(live, network()) as (optimizer, _), pytest.raises(InvalidRequest):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
