"""What workers and readers cost in memory, and who is refused for lack of it."""

from __future__ import annotations

import pytest
from gem_api.errors import LayoutMismatch, Overloaded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_server.core.memory_budget import MAX_COPIES
from kit.core import ONES, SMALL, bits, by_rule, commit, make_core, start, state

FLOATS = 4 * SMALL.size


@by_rule
def test_memory_is_theta_and_each_workers_buffers_and_upload(hyperparameters: Hyperparameters) -> None:
    core = make_core(hyperparameters)
    for number, worker in enumerate(("ann", "bob", "cy"), 1):
        core.register(worker, SMALL, 0.0)
        for_all = core.central.theta.nbytes * (1 + len(core.rule.shared) + core.rule.temporaries)
        held = for_all
        for lease in core.leases.live.values():
            held += FLOATS + sum(buffer.nbytes for buffer in lease.buffers.values())
        assert core.memory.held == held
        assert held == for_all + number * (core.memory.most_for_worker + FLOATS)


def test_a_worker_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    core = make_core(memory_limit=FLOATS * (1 + 2 * 3))
    start(core, ["ann", "bob"])
    before = state(core)
    with pytest.raises(Overloaded, match="worker number 3"):
        core.register("cy", SMALL, 0.0)
    assert state(core) == before
    core.leave("lease-1")
    core.register("cy", SMALL, 0.0)


def test_a_worker_that_takes_its_own_place_needs_no_more_room() -> None:
    core = make_core(memory_limit=FLOATS * (1 + 3))
    core.register("ann", SMALL, 0.0)
    assert core.register("ann", SMALL, 0.0).lease_id == "lease-2"


def test_a_model_that_does_not_fit_leaves_the_run_open_for_a_smaller_one() -> None:
    core = make_core(memory_limit=FLOATS * 4)
    with pytest.raises(Overloaded, match="worker number 1"):
        core.register("ann", Layout.of({"w": (2**40,)}), 0.0)
    assert core.register("bob", SMALL, 0.0).must_initialize


def test_another_model_is_a_mismatch_even_where_it_would_not_fit_either() -> None:
    """Overloaded says "try again later", and the worker would do so for ever."""
    core = make_core(memory_limit=FLOATS * 10)
    start(core, ["ann"])
    with pytest.raises(LayoutMismatch):
        core.register("bob", Layout.of({"w": (2**30,)}), 0.0)


def test_copies_for_readers_are_shared_counted_and_freed() -> None:
    core = make_core(memory_limit=FLOATS * (1 + 3 + 1))
    (ann,) = start(core)
    one = core.plan_copy()()
    same = core.plan_copy()()
    assert one is same
    assert core.central.copies == 1
    assert core.memory.held == core.memory.limit
    theta = bits(one.theta)
    commit(core, ann, 1, ONES)
    assert bits(one.theta) == theta, "a copy is of one version for good"
    assert one.version == 0
    with pytest.raises(Overloaded, match="another copy"):
        core.plan_copy()
    del one, same
    assert core.central.copies == 0
    assert core.plan_copy()().version == 1


def test_readers_hold_few_versions_at_once_even_without_a_limit() -> None:
    core = make_core()
    (ann,) = start(core)
    held = []
    for sequence in range(1, MAX_COPIES + 1):
        held.append(core.plan_copy()())
        commit(core, ann, sequence, ONES)
    with pytest.raises(Overloaded, match="being read already"):
        core.plan_copy()
    held.pop()
    core.plan_copy()


def test_where_the_machine_has_no_memory_the_worker_is_refused_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    start(core)
    before = state(core)

    def no_memory(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("gem_server.core.memory_budget.np.zeros", no_memory)
    for worker in ("bob", "ann"):  # a new one, and one that would take its own place
        with pytest.raises(Overloaded, match="no memory"):
            core.register(worker, SMALL, 0.0)
    assert state(core) == before
