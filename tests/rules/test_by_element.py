"""Rules by element: several cores that each hold a range of θ compute the same bits as one core that holds all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Group, Layout
from gem_api.ranges import WHOLE, Range
from gem_api.rules import RULES
from gem_server.core.state_machine import Core
from gem_server.core.values import LeaderRegistration
from gem_server.rules import rule_of
from kit.core import bits, commit, make_core

LAYOUT = Layout.of({"w": (100, 90), "b": (90,), "v": (6000,)})
GROUPED = Layout.of({"w": (100, 90), "b": (90,), "v": (6000,)}, {"w": Group(0.5, True), "b": Group(1.0, False)})
COUNTS = (1, 2, 3)
SCHEDULE: dict[str, Any] = {"schedule": "cosine", "warmup_versions": 3, "decay_versions": 40}


def settings(rule: str, **others: Any) -> Hyperparameters:
    local = {"local_steps": 4} if RULES[rule].kind == "delta" or rule == "agn" else {}
    return Hyperparameters(**{"rule": rule, "steps": 1, **SCHEDULE, **local, **others})


CASES = {
    **{rule: settings(rule) for rule in RULES},
    **{f"gem {snapshot}": settings("gem", snapshot=snapshot) for snapshot in ("paper", "reference")},
    **{f"gem, proxy {proxy}": settings("gem", rule_options=f"proxy={proxy}") for proxy in ("nesterov", "adam", "global")},
    **{f"{rule} around {optimizer}": settings(rule, optimizer=optimizer, weight_decay=0.01, learning_rate=0.001)
       for rule in ("gem", "downpour", "adaptive") for optimizer in ("adam", "adamw", "lion")},
    "downpour, deltas": settings("downpour", local_steps=4),
    "dcasgd, adaptive": settings("dcasgd", rule_options="mean_square=0.9"),
}  # fmt: skip
BY_ELEMENT = {name: case for name, case in CASES.items() if rule_of(case).by_element}
REFUSED = {
    **{name: settings(name) for name, row in RULES.items() if not row.by_element},
    "gem, proxy yellowfin": settings("gem", rule_options="proxy=yellowfin"),
    "diloco, delay": settings("diloco", rule_options="delay=2"),
}


def all_started(case: Hyperparameters, count: int, layout: Layout, theta: np.ndarray[Any, Any]) -> list[Core]:
    """A core for each range, each with two workers that have pulled θ."""
    cores = [make_core(case, part=Range(index, count)) for index in range(count)]
    for worker in ("ann", "bob"):
        leader = None
        for core in cores:
            registration = core.register(worker, layout, 0.0, leader=leader)
            leader = LeaderRegistration(registration.lease_id, cores[0].run_id, cores[0].settings)
    for core in cores:
        core.central.theta[:] = theta[core.central.layout.begin : core.central.layout.end]  # type: ignore[union-attr]
        core.initialized()
        for lease in core.leases.live.values():
            core.pull(lease)
    return cores


def trained(case: Hyperparameters, count: int, layout: Layout) -> tuple[bytes, dict[str, bytes]]:
    """θ, and all buffers joined over the ranges, after commits of two workers with staleness 0 to 3."""
    random = np.random.default_rng(1)
    cores = all_started(case, count, layout, random.normal(size=layout.size).astype(np.float32))
    done = {"lease-1": 0, "lease-2": 0}
    for turn in (0, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1):
        lease_id = f"lease-{turn + 1}"
        done[lease_id] += 1
        update = random.normal(scale=0.1, size=layout.size).astype(np.float32)
        for core in cores:
            assert core.central.layout is not None
            commit(core, lease_id, done[lease_id], update[core.central.layout.begin : core.central.layout.end])
    buffers = [
        {f"{lease.lease_id}/{name}": buffer for lease in core.leases.live.values() for name, buffer in lease.buffers.items()}
        | {f"/{name}": buffer for name, buffer in core.shared.buffers.items()}
        for core in cores
    ]
    joined = {name: bits(np.concatenate([each[name] for each in buffers])) for name in buffers[0]}
    return bits(np.concatenate([core.central.theta for core in cores])), joined


def takes_groups(case: Hyperparameters) -> bool:
    try:
        rule_of(case).require_fitting(GROUPED)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(case, LAYOUT, id=name) for name, case in BY_ELEMENT.items()]
    + [pytest.param(case, GROUPED, id=f"{name}, groups") for name, case in BY_ELEMENT.items() if takes_groups(case)],
)
def test_ranges_compute_the_bits_of_one_server(case: Hyperparameters, layout: Layout) -> None:
    whole = trained(case, 1, layout)
    for count in COUNTS[1:]:
        assert trained(case, count, layout) == whole


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_a_rule_that_is_not_by_element_is_refused_for_several_servers(case: Hyperparameters) -> None:
    make_core(case, part=WHOLE)
    with pytest.raises(ValueError, match="can't run on several servers"):
        make_core(case, part=Range(0, 2))
