"""A moment holds steps, −η·g: if a run goes on at another rate or schedule, the moments of its workers change too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import rate
from gem_server.core.records import Kind, Record
from gem_server.core.state_machine import Core
from kit.core import bits, commit, make_core, recorded, replay_all, restored, save_core, start

pytestmark = pytest.mark.usefixtures("quick_disk")
BEFORE = Hyperparameters(learning_rate=0.1, decay_versions=5, decay_factor=0.5)
CHANGES = {
    "nothing": BEFORE,
    "a lower rate": replace(BEFORE, learning_rate=0.01),
    "a schedule": replace(BEFORE, schedule="step", decay_versions=1, decay_factor=0.4),
    "a rate and a schedule": replace(BEFORE, learning_rate=0.3, schedule="cosine", warmup_versions=9, warmup_factor=0.1),
}
FIRST, THEN = 3, 5  # commits before the change, and after it


def steps(core: Core, count: int) -> list[float]:
    """How far each of some commits of ones takes the first element of θ."""
    out = []
    for _ in range(count):
        before = float(core.central.theta[0])
        commit(core, "lease-1", core.leases.get("lease-1").sequence + 1, 1.0)
        out.append(float(core.central.theta[0]) - before)
    return out


def expected(after: Hyperparameters, nesterov: bool) -> list[float]:
    """The same for one worker, in double precision: m ← μ·m·η/η' − η, at most 5·η."""
    moment, last, out = 0.0, 0.0, []
    for version in range(FIRST + THEN):
        eta = rate(BEFORE if version < FIRST else after, version)
        moment = (0.9 * moment * eta / last if last else 0.0) - eta
        last = eta
        out.append(max(-5 * eta, 0.9 * moment - eta if nesterov else moment))
    return out[FIRST:]


@pytest.mark.parametrize("proxy", ["momentum", "nesterov"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_resumed_run_steps_as_if_its_momenta_had_always_had_the_new_rate(change: str, proxy: str, tmp_path: Path) -> None:
    begun, after = (replace(each, rule_options=f"proxy={proxy}") for each in (BEFORE, CHANGES[change]))
    core = make_core(begun)
    start(core)
    steps(core, FIRST)
    save_core(core, tmp_path)
    resumed = restored(tmp_path, begun)
    resumed.change(after)
    again = save_core(resumed, tmp_path / "again")  # of a server that dies before the worker's next commit
    np.testing.assert_allclose(steps(resumed, THEN), expected(CHANGES[change], proxy == "nesterov"), rtol=1e-4)
    twice = restored(again.parent, after)
    steps(twice, THEN)
    assert bits(twice.central.theta) == bits(resumed.central.theta)


@pytest.mark.parametrize("proxy", ["momentum", "nesterov", "global", "yellowfin"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_replay_of_the_change_has_the_same_bits(change: str, proxy: str, tmp_path: Path) -> None:
    begun, after = (replace(each, rule_options=f"proxy={proxy}") for each in (BEFORE, CHANGES[change]))
    core = make_core(begun)
    start(core, ["ann", "bob"])
    save_core(core, tmp_path)
    records = recorded(core)
    steps(core, FIRST)
    core.change(after)
    records.append(Record(Kind.BEGAN, vars(after)))
    steps(core, THEN)
    again = restored(tmp_path, begun)
    replay_all(again, records)
    assert bits(again.central.theta) == bits(core.central.theta)
