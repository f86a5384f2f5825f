"""The optimizer that the first worker brings: adopted as a whole, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from core_helpers import SMALL, commit, make_core
from gem_api.errors import InvalidRequest, Overloaded
from gem_api.layout import Group, Layout
from gem_api.optimizer_choice import OptimizerChoice

HUGE = Layout.of({"w": (1_000_000,)})
ADAMW = OptimizerChoice("adamw", "beta2=0.9", 0.01, 0.1)


@pytest.mark.parametrize(
    ("first", "second"), [(ADAMW, None), (None, OptimizerChoice("worker")), (ADAMW, OptimizerChoice("lion"))]
)
def test_a_registration_that_fails_leaves_the_settings_of_the_worker_before(
    first: OptimizerChoice | None, second: OptimizerChoice | None
) -> None:
    """The same name registers again, before θ has a value, and there is no room for its model."""
    core = make_core(memory_limit=200_000)
    lease = core.register("ann", SMALL, 0.0, choice=first).lease_id
    settings, rule = core.settings, core.rule
    with pytest.raises(Overloaded):
        core.register("ann", HUGE, 0.0, choice=second)
    assert (core.settings, core.rule, core.memory.rule) == (settings, rule, rule)
    core.require_initializer(lease, 0.0)
    core.central.theta[:] = 0
    core.initialized()
    core.pull(core.leases.get(lease))
    assert commit(core, lease, 1, np.ones(SMALL.size)).version == 1


def test_a_worker_that_registers_again_may_bring_another_optimizer_as_long_as_there_is_no_run() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0, choice=ADAMW)
    core.register("ann", SMALL, 0.0, choice=OptimizerChoice("lion"))
    assert core.settings.optimizer == "lion"
    assert core.settings.weight_decay == 0


def test_the_last_worker_takes_its_optimizer_along() -> None:
    core = make_core()
    started_with = core.settings
    core.leave(core.register("ann", SMALL, 0.0, choice=ADAMW).lease_id)
    assert core.settings == started_with


@pytest.mark.parametrize("rate", [float("nan"), -1.0, float("inf")])
def test_an_invalid_rate_is_named(rate: float) -> None:
    core = make_core()
    with pytest.raises(InvalidRequest, match="--learning-rate must be"):
        core.register("ann", SMALL, 0.0, choice=OptimizerChoice("adamw", "", rate))
    assert not core.leases.live


def test_a_refused_layout_changes_nothing() -> None:
    core = make_core()
    before = core.settings
    with pytest.raises(InvalidRequest):
        core.register("ann", Layout.of({"w": (2,)}, {"w": Group(2.0)}), 0.0, choice=ADAMW)
    assert core.settings == before
