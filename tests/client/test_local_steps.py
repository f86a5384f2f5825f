"""Optimizer in runs with local steps: what a window commits, against SGD done by hand, and what ends a window early."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from client.torch_helpers import flat, loss_of, network, take_step, training
from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import rate
from gem_client import InvalidRequest, NonFiniteGradient, connect
from gem_client.torch import Optimizer, ShardSampler
from kit.model import Array, Patience, ended, expire_all, outcomes, theta, version
from kit.regions import abstract, linux_only
from kit.server import config, serving
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RATE = 0.1
AGN = Hyperparameters(rule="agn", learning_rate=RATE, local_steps=3)
DELTA = Hyperparameters(rule="downpour", learning_rate=RATE, local_steps=3)
NESTEROV = Hyperparameters(rule="downpour", learning_rate=RATE, local_steps=3, local_momentum=0.9, weight_decay=0.05)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


def gradient(model: nn.Module, step: int) -> Array:
    """At the model's own parameters."""
    gradients = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in gradients]).numpy()


def set_to(model: nn.Module, values: Array) -> None:
    torch.nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), model.parameters())


def assert_holds(model: nn.Module, values: Array) -> None:
    np.testing.assert_allclose(flat(model), values, **CLOSE)


class ByHand:
    """A worker's window: SGD with Nesterov momentum in NumPy, V ← μ·V − η·g, x ← x + μ·V − η·g."""

    def __init__(self, model: nn.Module, settings: Hyperparameters) -> None:
        self.model, self.settings = copy.deepcopy(model), settings
        self.velocity: npt.NDArray[np.floating] = np.zeros_like(flat(model))
        self.gradients: list[Array] = []

    def step(self, number: int, eta: float = RATE) -> None:
        own = self.settings
        x = flat(self.model)
        g = gradient(self.model, number) + own.weight_decay * x
        self.gradients.append(g)
        self.velocity = own.local_momentum * self.velocity - eta * g
        set_to(self.model, (x + own.local_momentum * self.velocity - eta * g).astype(np.float32))

    @property
    def x(self) -> Array:
        return flat(self.model)


# -- what a window commits


@pytest.mark.parametrize(("weight_decay", "momentum"), [(0.0, 0.0), (0.2, 0.9)])
def test_a_gradient_run_gets_the_mean_of_the_windows_gradients(weight_decay: float, momentum: float) -> None:
    """Momentum moves the worker, not what is committed."""
    settings = replace(AGN, weight_decay=weight_decay, local_momentum=momentum)
    with serving(config(settings)) as live:
        model = network()
        hand = ByHand(model, settings)
        with training(live, model) as (optimizer, session):
            assert session.update_kind == "gradient"
            for window in range(3):
                given = theta(live)
                assert_holds(model, given)
                set_to(hand.model, given)
                hand.gradients.clear()
                for step in range(3 * window, 3 * window + 3):
                    assert version(live) == window
                    assert_holds(model, hand.x)
                    take_step(model, optimizer, step)
                    hand.step(step)
                np.testing.assert_allclose(theta(live), given - RATE * np.mean(hand.gradients, axis=0), **CLOSE)
                assert version(live) == window + 1


def test_a_delta_run_gets_what_the_steps_changed_and_one_worker_does_what_sgd_does() -> None:
    """The velocity goes on from window to window: 9 steps in 3 windows are 9 steps of one optimizer."""
    with serving(config(NESTEROV)) as live:
        model = network()
        twin = copy.deepcopy(model)
        sgd = torch.optim.SGD(twin.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.05)
        hand = ByHand(model, NESTEROV)
        with training(live, model) as (optimizer, session):
            assert session.update_kind == "delta"
            for step in range(9):
                take_step(model, optimizer, step)
                take_step(twin, sgd, step)
                hand.step(step)
                assert_holds(model, flat(twin))
                assert_holds(model, hand.x)
                assert version(live) == (step + 1) // 3
            np.testing.assert_allclose(theta(live), flat(twin), **CLOSE)


def test_a_rule_that_takes_deltas_gets_one_of_a_single_step() -> None:
    settings = Hyperparameters(rule="aeasgd", learning_rate=RATE, rule_options="alpha=0.25")
    with serving(config(settings)) as live:
        model = network()
        with training(live, model) as (optimizer, _):
            given, hand = theta(live), ByHand(model, settings)
            take_step(model, optimizer, 0)
            hand.step(0)
            np.testing.assert_allclose(theta(live), given + 0.25 * (hand.x - given), **CLOSE)
            assert_holds(model, hand.x - 0.25 * (hand.x - given))


@pytest.mark.parametrize("made_with", [torch.bfloat16, torch.float32], ids=["always bfloat16", "converted later"])
def test_small_steps_of_a_bfloat16_model_add_up(made_with: torch.dtype) -> None:
    with serving(config(DELTA)) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.ones(4, dtype=made_with))
        optimizer = Optimizer([("w", parameter)], session)
        parameter.data = parameter.data.bfloat16()  # what `model.bfloat16()` does
        for _ in range(21):
            parameter.grad = torch.full((4,), 0.001, dtype=torch.bfloat16)
            optimizer.step()
        np.testing.assert_allclose(theta(live), 1 - 21 * RATE * 0.001, rtol=1e-4)
        assert torch.equal(parameter.detach(), torch.from_numpy(theta(live)).to(torch.bfloat16))


def test_local_steps_of_a_bfloat16_model_are_seen_by_the_next_gradient() -> None:
    with serving(config(DELTA)) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = Optimizer([("w", parameter)], session)
        for step in range(1, 3):
            parameter.grad = torch.full((4,), 1.0, dtype=torch.bfloat16)
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), torch.full((4,), 1 - RATE * step, dtype=torch.bfloat16))
        assert version(live) == 0


def test_parameters_whose_memory_is_replaced_in_mid_window_go_on_from_there() -> None:
    """As `model.cuda()` and `model.share_memory()` do it. The velocity goes on, too."""
    with serving(config(NESTEROV)) as live:
        model = network()
        hand = ByHand(model, NESTEROV)
        with training(live, model) as (optimizer, _):
            for step in range(6):
                take_step(model, optimizer, step)
                hand.step(step)
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            np.testing.assert_allclose(theta(live), hand.x, **CLOSE)


def test_sparse_gradients_get_decay_and_momentum_as_dense_ones_do() -> None:
    """PyTorch's SGD refuses to add a decay to a sparse gradient."""
    found = []
    for sparse in (False, True):
        with serving(config(NESTEROV)) as live, connect(live.address) as session:
            torch.manual_seed(0)
            table = nn.Embedding(6, 3, sparse=sparse)
            optimizer = Optimizer(table.named_parameters(), session)
            for step in range(6):
                optimizer.zero_grad()
                table(torch.tensor([1, 4, step])).pow(2).sum().backward()
                optimizer.step()
            found.append(theta(live))
    np.testing.assert_allclose(found[1], found[0], **CLOSE)


def test_a_parameter_without_a_gradient_stays_where_it_is() -> None:
    with serving(config(NESTEROV)) as live, connect(live.address) as session:
        used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = Optimizer([("used", used), ("unused", unused)], session)
        for _ in range(3):
            used.grad = torch.ones(3)
            optimizer.step()
        np.testing.assert_array_equal(theta(live)[3:], np.ones(3))
        assert (theta(live)[:3] < 0.9).all()


def test_the_loss_reported_is_the_mean_of_its_window() -> None:
    with serving(config(AGN)) as live:
        model = network()
        with training(live, model) as (optimizer, _):
            for step, loss in enumerate((1.0, 2.0, torch.tensor(6.0))):
                take_step(model, optimizer, step, loss=loss)
            lease = live.on_loop(lambda: next(iter(live.core.leases.live.values())))
            assert lease.last_applied.loss == 3.0


# -- weight decay and schedule


def test_weight_decay_of_plain_gradients_is_that_of_sgd() -> None:
    settings = Hyperparameters(rule="downpour", learning_rate=RATE, weight_decay=0.1)
    with serving(config(settings)) as live:
        model = network()
        twin = copy.deepcopy(model)
        sgd = torch.optim.SGD(twin.parameters(), lr=RATE, weight_decay=0.1)
        with training(live, model) as (optimizer, _):
            for step in range(10):
                take_step(model, optimizer, step)
                take_step(twin, sgd, step)
                assert_holds(model, flat(twin))


@pytest.mark.parametrize("local_steps", [1, 2])
def test_the_rate_follows_the_version(local_steps: int) -> None:
    """η_t is halved with each version; a window's steps are all made at the rate that it began with."""
    settings = Hyperparameters(
        rule="downpour", learning_rate=RATE, local_steps=local_steps, schedule="step", decay_versions=1, decay_factor=0.5
    )
    with serving(config(settings)) as live:
        model = network()
        hand = ByHand(model, settings)
        with training(live, model) as (optimizer, session):
            for step in range(4 * local_steps):
                shown = optimizer.param_groups[0]["lr"]
                assert shown == session.learning_rate == rate(settings, step // local_steps)
                take_step(model, optimizer, step)
                hand.step(step, shown)
            np.testing.assert_allclose(theta(live), hand.x, **CLOSE)
            assert optimizer.param_groups[0]["lr"] == RATE / 16
            optimizer.param_groups[0]["lr"] = RATE
            with pytest.raises(InvalidRequest, match="server's"):
                optimizer.step()


# -- windows that end early


def test_the_end_of_the_data_cuts_the_last_window_short_and_no_sample_is_left_out() -> None:
    settings = Hyperparameters(rule="agn", local_steps=3, batch_size=4, shard_size=10, epochs=1)
    with serving(config(settings)) as live, connect(live.address) as session:
        parameter, sizes = nn.Parameter(torch.zeros(3)), []
        optimizer = Optimizer([("w", parameter)], session)
        data = TensorDataset(torch.zeros(23))
        sampler = ShardSampler(session, data)
        while not sampler.complete:
            for (batch,) in DataLoader(data, batch_sampler=sampler):
                sizes.append(len(batch))
                parameter.grad = torch.zeros(3)
                optimizer.step()
            optimizer.finish()
        assert sorted(sizes) == [2, 2, 3, 4, 4, 4, 4]
        assert (version(live), session.steps_done) == (3, 3)
        assert live.on_loop(lambda: live.core.samples_committed) == 23
        assert live.on_loop(lambda: live.core.complete)


def test_a_window_cut_short_commits_the_mean_of_the_steps_made() -> None:
    with serving(config(AGN)) as live:
        model = network()
        with training(live, model) as (optimizer, _):
            given, hand = theta(live), ByHand(model, AGN)
            for step in range(2):
                take_step(model, optimizer, step)
                hand.step(step)
            assert version(live) == 0
            optimizer.finish()
            np.testing.assert_allclose(theta(live), given - RATE * np.mean(hand.gradients, axis=0), **CLOSE)
            assert_holds(model, theta(live))
            optimizer.finish()
            assert version(live) == 1


def test_a_window_cut_short_completes_its_own_batches_and_none_that_was_read_ahead() -> None:
    settings = Hyperparameters(rule="agn", local_steps=3, batch_size=4, shard_size=100)
    with serving(config(settings)) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session)
        ahead = iter(session.shards(100))
        for _ in range(5):
            next(ahead)
        for _ in range(2):
            optimizer.step()
        optimizer.finish()
        assert live.on_loop(lambda: live.core.samples_committed) == 2 * 4


@pytest.mark.parametrize("settings", [AGN, NESTEROV], ids=["gradient", "delta"])
def test_a_lease_lost_in_mid_window_drops_the_window(settings: Hyperparameters) -> None:
    with serving(config(settings)) as live:
        model, other = network(), network()
        with training(live, model) as (optimizer, session):
            take_step(model, optimizer, 0)
            expire_all(live)
            with training(live, other) as (second, _):
                for step in range(3):
                    take_step(other, second, step)
            for step in (1, 2):
                take_step(model, optimizer, step)
            assert optimizer.answer is not None
            assert optimizer.answer.lost
            assert version(live) == 1
            np.testing.assert_array_equal(flat(model), theta(live))
            given, hand = theta(live), ByHand(model, settings)
            for step in range(3, 6):
                take_step(model, optimizer, step)
                hand.step(step)
            moved = hand.x - given if session.update_kind == "delta" else -RATE * np.mean(hand.gradients, axis=0)
            np.testing.assert_allclose(theta(live), given + moved, **CLOSE)


def test_a_lease_found_lost_between_two_steps_ends_the_window_at_once() -> None:
    settings = Hyperparameters(rule="agn", local_steps=6, batch_size=4, shard_size=8, epochs=1)
    with serving(config(settings)) as live, connect(live.address) as session:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = Optimizer([("w", parameter)], session)
        shards = session.shards(40)
        applied: set[int] = set()
        window: list[int] = []
        handed_out = dropped_at = 0
        while not shards.complete:
            for batch in shards:
                handed_out += 1
                if handed_out == 3:
                    expire_all(live)  # the fourth batch asks for a shard ahead of time
                window += batch
                parameter.grad = torch.zeros(3)
                before = optimizer.answer
                optimizer.step()
                if optimizer.answer is not before:
                    applied.update(() if optimizer.answer is None or optimizer.answer.lost else window)
                    dropped_at = dropped_at or handed_out
                    window = []
            optimizer.finish()
            applied.update(window)
            window = []
        assert applied == set(range(40))
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == 40
        assert session.generation == 2
        assert dropped_at in (4, 5)  # the answer to that request may come a batch later


@pytest.mark.parametrize("settings", [AGN, NESTEROV], ids=["gradient", "delta"])
def test_a_window_that_is_refused_is_forgotten_velocity_and_all(settings: Hyperparameters) -> None:
    with serving(config(settings)) as live:
        model, other = network(), network()
        with training(live, model) as (optimizer, _), training(live, other) as (second, _):
            for step in range(2):
                take_step(model, optimizer, step)
            for step in range(3):
                take_step(other, second, step)
            loss_of(model, 2).backward()
            model[0].weight.grad[0, 0] = float("nan")  # type: ignore[index]
            with pytest.raises(NonFiniteGradient):
                optimizer.step()
            assert outcomes(live) == {"applied": 1, "rejected": 1}
            np.testing.assert_array_equal(flat(model), theta(live))  # with the other's commit in it
            given, hand = theta(live), ByHand(model, settings)
            for step in range(3, 6):
                take_step(model, optimizer, step)
                hand.step(step)
            assert optimizer.answer is not None
            assert optimizer.answer.staleness == 0
            expected = hand.x if settings is NESTEROV else given - RATE * np.mean(hand.gradients, axis=0)
            np.testing.assert_allclose(theta(live), expected, **CLOSE)


# -- where the parameters live


@linux_only
@pytest.mark.parametrize("settings", [AGN, DELTA], ids=["gradient", "delta"])
def test_local_steps_leave_the_memory_alone_that_the_server_writes_to(settings: Hyperparameters) -> None:
    with serving(config(settings, memory_socket=abstract())) as live:
        model = network()
        with training(live, model) as (optimizer, session):
            assert session.shares_memory
            for window in range(2):
                given = theta(live)
                for step in range(2):
                    take_step(model, optimizer, 3 * window + step)
                    np.testing.assert_array_equal(session.theta, given)
                    assert not np.array_equal(flat(model), given)
                take_step(model, optimizer, 3 * window + 2)


def test_a_server_that_comes_back_with_other_settings_has_its_workers_go_by_them(tmp_path: Path) -> None:
    """A rule that takes deltas has its learning rate from the workers alone."""
    model, twin = network(), network()
    with serving(config(DELTA, checkpoint_dir=tmp_path)) as live:
        session = connect(live.address, retry=Patience().retry())
        optimizer = Optimizer(model.named_parameters(), session)
        for step in range(3):
            take_step(model, optimizer, step)
        live.stop()
        changed = replace(DELTA, learning_rate=RATE / 4, weight_decay=0.01)
        back_config = replace(live.config, hyperparameters=changed, given=frozenset({"learning_rate", "weight_decay"}))
        with serving(replace(back_config, listen=live.address, resume=True)) as back, session:
            for step in range(3):
                take_step(model, optimizer, step)  # the first window comes under the lease of before, and is dropped
            assert optimizer.answer is not None
            assert optimizer.answer.lost
            assert ended(back) == {"rolled_back": 1}
            assert (session.learning_rate, optimizer.param_groups[0]["lr"]) == (RATE / 4, RATE / 4)
            twin.load_state_dict(model.state_dict())
            sgd = torch.optim.SGD(twin.parameters(), lr=RATE / 4, weight_decay=0.01)
            for step in range(3):
                take_step(model, optimizer, step)
                take_step(twin, sgd, step)
            np.testing.assert_allclose(theta(back), flat(twin), **CLOSE)
