"""Who gives θ its first value, whoever leaves or dies before that."""

from __future__ import annotations

import pytest
from gem_api.errors import LayoutMismatch
from gem_api.layout import Layout
from gem_server.core.facts import PullDecision
from kit.core import SMALL, make_core


@pytest.mark.parametrize("end", ["leave", "expire", "replace"])
def test_there_is_always_exactly_one_initialiser_while_there_are_workers(end: str) -> None:
    core = make_core(lease_seconds=10)
    for worker in ("ann", "bob"):
        core.register(worker, SMALL, 0.0)
    if end == "leave":
        core.leave("lease-1")
    elif end == "expire":
        core.renew("lease-2", 9.0)
        core.expire(10.0)
    else:
        core.register("ann", SMALL, 0.0)
    asked = [lease for lease in core.leases.live if core.pull_decision(lease, 0.0) is PullDecision.INITIALIZE]
    assert asked == ["lease-2"]


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
