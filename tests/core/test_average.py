"""The average of θ that a run keeps: what it is, where it begins, what it takes, and that a replay has the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from gem_api.errors import InvalidRequest, NotInitialized, Overloaded, RuleFailed
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.rules import RULES
from gem_server.core.memory_budget import MAX_COPIES
from gem_server.core.records import Kind, Record
from gem_server.core.state_machine import Core
from gem_server.rules import ArrayRule, RuleInput, rule_of
from gem_server.rules.average import follow
from gem_server.rules.base import Buffers
from gem_server.rules.specification import average
from gem_server.rules.threads import Threads
from kit.core import SMALL, bits, commit, make_core, recorded, replay_all, restored, save_core, start

F = np.float32
KEPT = Hyperparameters(average=0.9)
LAYOUT = Layout.of({"w": (70, 100), "none": (0, 4), "scale": (), "b": (500,)})
SETTINGS = [
    *(Hyperparameters(rule=rule, average=0.9) for rule in RULES),
    *(Hyperparameters(rule="gem", optimizer=optimizer, average=0.99) for optimizer in ("adamw", "lion")),
]
by_rule = pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: f"{each.rule}-{each.optimizer}")


class Exact:
    """The average of a core in double precision, and a bound on what float32 may differ from it, element by element.

    A step rounds three times, each time by half a unit in the last place, of numbers not larger than θ and the average.
    """

    def __init__(self, core: Core) -> None:
        self._decay = core.settings.average
        self.mean = core.central.theta.astype(np.float64)
        self._bound = np.zeros(self.mean.size)

    def follow(self, theta: Vector) -> None:
        values = theta.astype(np.float64)
        largest = np.maximum(abs(values), abs(self.mean)) + self._bound
        self._bound = self._decay * self._bound + np.finfo(F).eps * (largest + 2 * (1 - self._decay) * 2 * largest)
        self.mean = self._decay * self.mean + (1 - self._decay) * values

    def require(self, core: Core) -> None:
        assert core.central.average is not None
        assert np.all(abs(core.central.average - self.mean) <= self._bound)
        assert not np.array_equal(core.central.average, core.central.theta)


def train(core: Core, random: np.random.Generator, commits: int, exact: Exact | None = None) -> None:
    """Commits of the live workers at random, each on the θ that its worker received last."""
    for _ in range(commits):
        lease = core.leases.get(str(random.choice([*core.leases.live])))
        values = random.normal(size=core.central.size) * 10.0 ** random.uniform(-3, 0, size=core.central.size)
        if not commit(core, lease.lease_id, lease.sequence + 1, values).discarded and exact is not None:
            exact.follow(core.central.theta)


def begun(settings: Hyperparameters, workers: int = 3) -> tuple[Core, np.random.Generator]:
    core, random = make_core(settings), np.random.default_rng(len(settings.rule))
    start(core, [f"w{number}" for number in range(workers)], LAYOUT, random.normal(size=LAYOUT.size))
    return core, random


def values(core: Core) -> bytes:
    assert core.central.average is not None
    return bits(core.central.theta) + bits(core.central.average)


# -- the arithmetic


@by_rule
def test_it_is_the_average_over_all_workers_commits_in_double_precision(settings: Hyperparameters) -> None:
    core, random = begun(settings)
    exact = Exact(core)
    train(core, random, 300, exact)
    exact.require(core)


@pytest.mark.parametrize("decay", [0.5, 0.999, 1 - 2**-30])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_compiled_pass_equals_the_specification_bit_by_bit(decay: float, threads: int) -> None:
    random = np.random.default_rng(threads)
    for size in (1, 7, 5000):
        theta, mean = (random.normal(size=size).astype(F) for _ in range(2))
        expected = average(mean, theta, decay)
        follow(Threads(threads, least=1), theta, mean, decay)
        assert bits(mean) == bits(expected)


def test_a_decay_near_1_does_not_draw_it_away_from_theta() -> None:
    """With β·a + (1 − β)·θ in float32 it would settle 1.7e-4 beside a θ of 1: β and 1 − β, rounded, do not add up to 1."""
    random, decay = np.random.default_rng(0), 0.9999
    mean = np.ones(50, F)
    exact = mean.astype(np.float64)
    for _ in range(20_000):
        theta = (1 + 0.1 * random.standard_normal(50)).astype(F)
        mean = average(mean, theta, decay)
        exact = decay * exact + (1 - decay) * theta
    assert np.max(abs(mean - exact)) < 2e-5


# -- a version


def test_a_commit_that_is_discarded_and_one_whose_rule_raises_leave_it_alone() -> None:
    core = make_core(Hyperparameters(rule="ringmaster", rule_options="threshold=1", average=0.5))
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, 1.0)
    before = values(core)
    assert commit(core, bob, 1, 1.0).discarded
    assert values(core) == before
    core = make_core(Hyperparameters(rule="core.test_average:Odd", average=0.5))
    (ann,) = start(core, ["ann"])
    commit(core, ann, 1, 1.0)
    before = values(core)
    with pytest.raises(RuleFailed):
        commit(core, ann, 2, 1.0)
    assert values(core) == before


@dataclass(frozen=True)
class Odd(ArrayRule):
    """Fails on the second commit, once it has moved θ."""

    learning_rate: float = 0.1
    name: ClassVar[str] = "odd"

    def move(self, theta: Vector, update: Vector, buffers: Buffers, rule_input: RuleInput) -> None:
        theta -= F(self.learning_rate) * update
        if rule_input.version:
            raise ZeroDivisionError


@dataclass(frozen=True)
class Namesake(Odd):
    """A rule that keeps an array of the same name."""

    shared = ("average",)


def test_a_rule_with_an_array_of_its_name_is_refused_only_if_one_is_kept() -> None:
    rule_of(Hyperparameters(rule="core.test_average:Namesake"))
    with pytest.raises(ValueError, match="keeps an array named 'average', as --average does"):
        make_core(Hyperparameters(rule="core.test_average:Namesake", average=0.5))


def test_a_commit_counts_once_whatever_its_share_of_a_batch() -> None:
    core = make_core(Hyperparameters(rule="downpour", smallest_share=0.25, average=0.5))
    (ann,) = start(core)
    commit(core, ann, 1, 1.0, share=0.25)
    assert core.central.progress == 0.25
    np.testing.assert_array_equal(core.central.average, 0.5 * core.central.theta)


# -- on, off, and changed at a resume


def test_no_average_costs_nothing() -> None:
    core, _ = begun(Hyperparameters())
    assert core.central.average is None
    with pytest.raises(InvalidRequest, match=r"this run keeps no average of θ: start its server with --average DECAY"):
        core.plan_copy(average=True)
    with pytest.raises(NotInitialized):
        make_core(KEPT).plan_copy(average=True)


def test_a_resumed_run_keeps_it_and_may_change_it_begin_one_at_its_theta_or_drop_it(tmp_path: Path) -> None:
    core, random = begun(KEPT)
    train(core, random, 5)
    save_core(core, tmp_path)
    again = restored(tmp_path, KEPT)
    assert values(again) == values(core)
    assert again.central.average is not again.central.theta
    again.change(replace(KEPT, average=0.5))
    assert values(again) == values(core), "the new decay counts from here on"
    again.change(replace(KEPT, average=0.0))
    assert again.central.average is None
    save_core(again, tmp_path)
    without = restored(tmp_path, replace(KEPT, average=0.0))
    assert without.central.average is None
    without.change(replace(KEPT, average=0.25))
    exact = Exact(without)
    train(without, random, 20, exact)
    exact.require(without)


def test_a_replay_of_commits_and_of_changed_decays_has_the_same_bits(tmp_path: Path) -> None:
    core, random = begun(replace(KEPT, rule="gem", optimizer="adamw"))
    save_core(core, tmp_path)
    records = recorded(core)
    for decay in (0.9, 0.5, 0.0, 0.99):
        changed = replace(core.settings, average=decay)
        core.change(changed)
        records.append(Record(Kind.BEGAN, vars(changed)))
        train(core, random, 7)
        again = restored(tmp_path, replace(KEPT, rule="gem", optimizer="adamw"))
        replay_all(again, records)
        assert bits(again.central.theta) == bits(core.central.theta)
        assert (again.central.average is None) == (core.central.average is None) == (not decay)
        if decay:
            assert values(again) == values(core)


# -- memory and readers


def test_it_takes_the_memory_of_one_more_theta_and_the_limit_counts_it() -> None:
    size = 4 * SMALL.size
    with_, without = make_core(KEPT), make_core()
    for core in (with_, without):
        start(core)
    assert with_.memory.held - without.memory.held == size
    limit = without.memory.held
    make_core(memory_limit=limit).register("ann", SMALL, 0.0)
    with pytest.raises(Overloaded, match="no memory for worker number 1"):
        make_core(KEPT, memory_limit=limit).register("ann", SMALL, 0.0)


def test_readers_share_a_copy_of_it_which_is_none_of_theta() -> None:
    core, random = begun(KEPT)
    train(core, random, 2)
    one, same, theta = core.plan_copy(True)(), core.plan_copy(True)(), core.plan_copy()()
    assert one is same
    assert one.version == theta.version == 2
    assert bits(one.theta) + bits(theta.theta) == bits(core.central.average) + bits(core.central.theta)
    assert core.central.copies == 2
    held = [one, theta]
    for _ in range(MAX_COPIES // 2 - 1):
        train(core, random, 1)
        held += [core.plan_copy(True)(), core.plan_copy()()]
    train(core, random, 1)
    with pytest.raises(Overloaded, match="copies of the model are being read"):
        core.plan_copy(True)


def test_the_average_of_a_range_is_that_part_of_one_servers(tmp_path: Path) -> None:
    """Two cores with a part each, the same commits: the bits of one core with all."""
    whole, parts = make_core(KEPT), [make_core(KEPT), make_core(KEPT)]
    cut, random = 6, np.random.default_rng(3)
    for core, layout in zip((whole, *parts), ({"w": (9,)}, {"w": (cut,)}, {"w": (9 - cut,)}), strict=True):
        start(core, ["ann"], Layout.of(layout), 1.0)
    for sequence in range(1, 20):
        gradient = random.normal(size=9)
        for core, part in zip((whole, *parts), (slice(9), slice(cut), slice(cut, 9)), strict=True):
            commit(core, "lease-1", sequence, gradient[part])
    assert bits(np.concatenate([core.central.average for core in parts])) == bits(whole.central.average)
