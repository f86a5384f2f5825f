"""Tensors with a learning rate of their own, or without weight decay: from the session to θ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gem_api.errors import InvalidRequest, LayoutMismatch
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import PLAIN as NO_GROUP
from gem_api.layout import Group, Layout
from gem_api.v1 import tensors_pb2 as pb
from gem_client import connect
from gem_server.durability.checkpoint import newest, restore
from kit.core import bits, commit, make_core, save_core, start
from kit.model import GRADIENT, PLAIN, model, theta
from kit.server import config, serving

GROUPS = {"b": Group(0.5, False)}
DECAYING = replace(PLAIN, weight_decay=0.1)
ADAMW = Hyperparameters(rule="gem", optimizer="adamw", learning_rate=0.01, weight_decay=0.1, pi_max=1.0)


def test_groups_cross_the_wire_and_are_part_of_the_fingerprint() -> None:
    plain, grouped = (Layout.of({"w": (2,), "b": (3,)}, groups) for groups in ({}, GROUPS))
    received = Layout.from_message(pb.TensorLayout.FromString(grouped.to_message().SerializeToString()))
    assert received == grouped
    assert received.groups == GROUPS
    assert len({plain.fingerprint, grouped.fingerprint, Layout.of({"w": (2,), "b": (3,)}, {"b": Group(0.5)}).fingerprint}) == 3


def test_a_tensor_without_a_group_is_written_as_before_there_were_groups() -> None:
    layout = Layout.of({"w": (2,)}, {"w": NO_GROUP})
    assert layout.to_message().tensors[0].SerializeToString() == pb.TensorSpec(name="w", shape=[2]).SerializeToString()
    assert Layout.from_message(layout.to_message()).groups == {}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        *[({"w": Group(factor)}, "learning-rate factor") for factor in (-0.1, float("nan"), float("inf"), 1.1)],
        ({"v": Group(0.5)}, "parameter groups name tensors that the layout does not have: v"),
    ],
)
def test_a_factor_out_of_range_and_a_group_of_no_tensor_are_refused(groups: dict[str, Group], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Layout.of({"w": (2,)}, groups)


def test_workers_decay_and_step_by_tensor() -> None:
    with serving(config(DECAYING)) as live, connect(live.address) as session:
        session.join(model(), groups=GROUPS)
        first = session.theta.copy()
        session.commit(np.zeros_like(GRADIENT))
        parts, before = session.layout.split(theta(live)), session.layout.split(first)
        np.testing.assert_allclose(parts["w"], before["w"] * (1 - 0.05), rtol=1e-6)
        np.testing.assert_array_equal(parts["b"], before["b"])
        session.commit({"w": np.zeros((2, 3)), "b": np.ones(3)}, decay=False)
        moved = session.layout.split(theta(live))["b"]
        np.testing.assert_allclose(moved, before["b"] - 0.5 * PLAIN.learning_rate, rtol=1e-6)


def test_workers_with_other_groups_are_told_which_tensor_differs() -> None:
    with serving(config(PLAIN)) as live, connect(live.address) as ann, connect(live.address) as bob:
        ann.join(model(), groups=GROUPS)
        with pytest.raises(LayoutMismatch, match=r"'b' has learning-rate factor 1 and weight decay, but in this run .*0\.5"):
            bob.join(model())


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lion"])
def test_a_checkpoint_keeps_groups_and_the_optimizers_state_bit_by_bit(optimizer: str, tmp_path: Path) -> None:
    """The next commit after a restart moves θ as it would have without one."""
    settings = replace(ADAMW, optimizer=optimizer)
    layout = Layout.of({"w": (5,), "b": (3,)}, GROUPS)
    core = make_core(settings)
    random = np.random.default_rng(1)
    (lease,) = start(core, ["ann"], layout, random.normal(size=8))
    for sequence in range(1, 4):
        commit(core, lease, sequence, random.normal(size=8))
    save_core(core, tmp_path)
    found = newest(tmp_path, lambda path, why: pytest.fail(f"{path} was refused: {why}"))
    assert found is not None
    again = make_core(settings, first_id=100)
    restore(*found, again, 0.0)
    assert again.central.layout == layout
    last = random.normal(size=8)
    for each in (core, again):
        commit(each, lease, 4, last)
    assert bits(again.central.theta) == bits(core.central.theta)
    for name, buffer in core.shared.buffers.items():
        assert bits(again.shared.buffers[name]) == bits(buffer)
