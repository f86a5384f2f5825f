"""Optimizers that the server keeps for all workers: their steps, how the rules apply them, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gem_api.layout import Group, Layout, Vector
from gem_server.rules import make_rule
from gem_server.rules.fused import BLOCK
from gem_server.rules.specification import adam, lion, match
from kit.core import bits
from rules.passes import Run, gradient

F = np.float32
SIZES = [1, BLOCK - 1, 3 * BLOCK + 37]
COMMITS = 12
OPTIMIZERS = {"adam": 0.0, "adamw": 0.1, "lion": 0.1}  # with their decay on the server


def step(
    optimizer: str, theta: Vector, state: dict[str, Vector], update: Vector, age: float, count: float, weight: float = 1.0
) -> Vector:
    """Δ by the specification; updates the state."""
    decay = F(OPTIMIZERS[optimizer])
    if optimizer == "lion":
        delta, state["first_moment"] = lion(theta, state["first_moment"], update, count, 0.01, 0.9, 0.99, decay, weight)
        return delta
    delta, state["first_moment"], state["second_moment"] = adam(
        theta, state["first_moment"], state["second_moment"], update, age, count, 0.01, 0.9, 0.999, F(1e-8), decay, weight
    )
    return delta


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gem", "gem, shares", "downpour", "adaptive"])
def test_the_compiled_pass_equals_the_specification_bit_by_bit(name: str, optimizer: str, size: int) -> None:
    """Three workers in turn, so that snapshots are stale; all share one state. One leaves after half of the commits, so that
    the optimizer's memory changes, as it does in the first round. Or they have shares of a batch, one of them is alone at the
    end, so that n would be below 1, and κ grows meanwhile."""
    name, shares = name.partition(",")[::2]
    growth = 3.0 if shares else 0.0
    settings: dict[str, Any] = {"rule_options": f"growth={growth}", "kappa": 1.5, "epsilon": 1e-12} if name == "gem" else {}
    rule = make_rule(name, optimizer=optimizer, learning_rate=0.01, weight_decay=0.1, **settings)
    random = np.random.default_rng(size)
    run = Run.of(rule, random.normal(size=size).astype(F), workers=3)
    theta, age = run.theta, 0.0
    state = {each: buffer.copy() for each, buffer in run.shared.buffers.items()}
    for version in range(COMMITS):
        if version == COMMITS // 2 and not shares:
            run.workers.pop()
        workers = len(run.workers)
        update, buffers = gradient(random, size), run.workers[version % workers]
        staleness = min(version, workers - 1)
        weight, passed = 1.0, float(staleness)
        if shares:
            weight, passed = [(1.0, 0.3125), (0.25, 1.0625), (0.0625, 1.25)][version % 3] if version < 9 else (0.1, 0.0)
        counted = max(1.0, passed + weight) if name == "gem" else 1.0
        age += weight * 2 / (counted + 1)
        delta = step(optimizer, theta, state, update, age, counted, weight)
        if name == "gem":
            matched = (age, counted, passed, 1.5, F(1e-12), F(1), 1.5, weight, growth)
            expected, sent, _ = match(theta, buffers["snapshot"], delta, *matched)
        else:
            expected = sent = theta + delta / F(staleness + 1 if name == "adaptive" else 1)
        run.commit(update, version % workers, staleness, weight=weight, passed=passed)
        if shares:
            assert run.shared.numbers["age"] == pytest.approx(age, rel=1e-15)
            age = run.shared.numbers["age"]
        assert bits(theta) == bits(expected)
        assert bits(buffers["snapshot"]) == bits(sent)
        assert all(bits(buffer) == bits(state[each]) for each, buffer in run.shared.buffers.items())


def parameters(theta: Vector) -> list[torch.Tensor]:
    return [torch.tensor(theta[:5], requires_grad=True), torch.tensor(theta[5:], requires_grad=True)]


@pytest.mark.parametrize(
    ("optimizer", "settings", "rival"),
    [
        ("adam", {}, lambda p: torch.optim.Adam(p, lr=0.01)),
        ("adamw", {"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
        (
            "adamw",
            {"optimizer_options": "beta1=0.8 beta2=0.95 epsilon=1e-4"},
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-4, weight_decay=0),
        ),
    ],
)
def test_one_worker_makes_the_steps_of_pytorchs_optimizer(
    optimizer: str, settings: dict[str, Any], rival: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    random = np.random.default_rng(1)
    theta = random.normal(size=12).astype(F)
    theirs = parameters(theta)
    their_optimizer = rival(theirs)
    run = Run.of(make_rule("downpour", optimizer=optimizer, learning_rate=0.01, **settings), theta)
    for _ in range(50):
        update = random.normal(size=12).astype(F)
        theirs[0].grad, theirs[1].grad = torch.tensor(update[:5]), torch.tensor(update[5:])
        their_optimizer.step()
        run.commit(update)
    np.testing.assert_allclose(run.theta, torch.cat(theirs).detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["gem", "downpour"])
@pytest.mark.parametrize("optimizer", ["sgd", *OPTIMIZERS])
def test_a_tensor_has_its_own_learning_rate_and_no_decay(name: str, optimizer: str) -> None:
    """Three tensors with other factors move as they do alone in runs with such rates."""
    random = np.random.default_rng(3)
    groups = {"slow": Group(0.5, True), "bias": Group(1.0, False), "frozen": Group(0.0, True)}
    layout = Layout.of({"plain": (9,), "slow": (BLOCK + 3,), "bias": (4,), "frozen": (2,)}, groups)
    theta = random.normal(size=layout.size).astype(F)
    updates = [gradient(random, layout.size) for _ in range(6)]

    def run(layout: Layout, theta: Vector, updates: list[Vector], rate: float, decay: float) -> Vector:
        run = Run.of(make_rule(name, optimizer=optimizer, learning_rate=rate, weight_decay=decay), theta)
        for update in updates:
            run.commit(update, layout=layout)
        return run.theta

    together = layout.split(run(layout, theta, updates, 0.5, 0.25))
    parts, cut = layout.split(theta), [layout.split(update) for update in updates]
    for each, rate, decay in [("plain", 0.5, 0.25), ("slow", 0.25, 0.25), ("bias", 0.5, 0.0)]:
        alone = run(Layout.of({each: parts[each].shape}), parts[each], [part[each] for part in cut], rate, decay)
        assert bits(together[each]) == bits(alone), each
    assert bits(together["frozen"]) == bits(parts["frozen"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rate", [1e-30, 1e3])
def test_extreme_gradients_and_rates_leave_theta_finite(optimizer: str, rate: float) -> None:
    options = "beta1=0.99999 beta2=0" + (" epsilon=1e-12" if optimizer != "lion" else "")
    rule = make_rule("gem", optimizer=optimizer, learning_rate=rate, optimizer_options=options, weight_decay=1.0, pi_max=1e6)
    run = Run.of(rule, np.array([3.4e38, -3.4e38, 0, 1, -1e-38, 1e30], F))
    most = rule.largest
    for version, value in enumerate([most, -most, F(0), most, F(1e-38), F(np.nan), F(np.inf)]):
        run.commit(np.full(6, value, F), factor=version % 2)
        assert np.isfinite(run.theta).all()
        assert all(np.isfinite(buffer).all() for buffer in run.shared.buffers.values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "gem", "optimizer": "rmsprop"}, "no optimizer is named 'rmsprop': choose from sgd, adam, adamw, lion"),
        (
            {"rule": "gem", "optimizer": "lion", "optimizer_options": "epsilon=1"},
            "the optimizer has no setting 'epsilon'",
        ),
        ({"rule": "gem", "optimizer": "adam", "optimizer_options": "beta2=1"}, "beta2 must lie in"),
        ({"rule": "gem", "optimizer": "adamw", "optimizer_options": "beta1=NaN"}, "beta1 must lie in"),
        ({"rule": "gem", "optimizer": "adam", "optimizer_options": "epsilon=0"}, "the optimizer's epsilon must lie in"),
        (
            {"rule": "gem", "optimizer": "sgd", "optimizer_options": "beta1=0.5"},
            "the optimizer has no setting 'beta1': it has no settings",
        ),
        ({"rule": "gem", "optimizer": "adamw", "rule_options": "proxy=adam"}, "the setting 'proxy' only with --optimizer sgd"),
        ({"rule": "gem", "rule_options": "growth=5"}, "the setting 'growth' only with an optimizer: add --optimizer adamw"),
        ({"rule": "downpour", "optimizer": "adamw", "local_steps": 2}, "can't be combined with --local-steps above 1"),
        ({"rule": "agn", "optimizer": "adamw"}, "rule agn averages the gradients of SGD"),
        (
            {"rule": "fedbuff", "optimizer": "adamw"},
            "rule fedbuff can't apply --optimizer adamw: use gem, downpour or adaptive",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_rule(**settings)


def test_a_proxy_with_one_rate_for_all_refuses_parameter_groups() -> None:
    layout = Layout.of({"w": (2,)}, {"w": Group(0.5, True)})
    make_rule("gem").require_fitting(layout)
    with pytest.raises(ValueError, match="one learning rate for all tensors"):
        make_rule("gem", rule_options="proxy=nesterov").require_fitting(layout)
