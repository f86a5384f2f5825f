"""Who gives θ its first value, whoever leaves or dies before that."""

from __future__ import annotations

import pytest
from gem_api.errors import LayoutMismatch
from gem_api.layout import Layout
from kit.core import SMALL, make_core, start


def test_when_all_leave_before_the_first_value_the_next_worker_may_bring_another_model() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    core.leave("lease-1")
    assert core.register("bob", Layout.of({"other": (4,)}), 0.0).must_initialize
    assert core.central.size == 4


def test_a_lone_worker_may_come_back_with_another_model_before_the_first_value() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    assert core.register("ann", Layout.of({"other": (4,)}), 0.0).must_initialize
    assert core.central.size == 4
    with pytest.raises(LayoutMismatch):  # but not past another worker
        core.register("bob", SMALL, 0.0)
    core.register("bob", Layout.of({"other": (4,)}), 0.0)
    with pytest.raises(LayoutMismatch):
        core.register("ann", SMALL, 0.0)


def test_when_all_leave_after_the_first_value_theta_stays() -> None:
    core = make_core()
    (lease,) = start(core, theta=3.0)
    core.leave(lease)
    core.register("bob", SMALL, 0.0)
    core.pull(core.leases.get("lease-2"))
    assert (core.reply(core.leases.get("lease-2")) == 3).all()
    with pytest.raises(LayoutMismatch):
        core.register("cy", Layout.of({"other": (4,)}), 0.0)
