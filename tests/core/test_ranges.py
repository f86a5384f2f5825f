"""A core that holds a range of θ: who may register, which run it belongs to, and which sequence numbers it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gem_api.errors import (
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    NonFiniteGradient,
    PermissionDenied,
    SequenceGap,
    SettingsDiffer,
)
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.ranges import Range
from gem_api.schedule import Schedule
from gem_server.core.state_machine import Core
from gem_server.core.values import EndReason, LeaderRegistration
from kit.core import commit, header, make_core, send

LAYOUT = Layout.of({"w": (20_000,)})
SECOND = Range(1, 2)


def leader(lease: str = "a" * 32, run: str = "run", settings: Hyperparameters | None = None) -> LeaderRegistration:
    return LeaderRegistration(lease, run, settings or Hyperparameters())


def started(part: Range = SECOND) -> Core:
    core = make_core(part=part)
    core.register("ann", LAYOUT, 0.0, leader=leader())
    core.initialized()
    core.pull(core.leases.get("a" * 32))
    return core


def test_a_range_opens_the_lease_that_the_leader_gave_and_holds_its_part() -> None:
    core = make_core(part=SECOND)
    registration = core.register("ann", LAYOUT, 0.0, leader=leader())
    assert registration.lease_id == "a" * 32
    assert registration.must_initialize
    assert registration.layout.bounds == (8192, 20_000)
    assert core.central.theta.size == 20_000 - 8192


def test_a_worker_registers_with_the_leader_first() -> None:
    with pytest.raises(InvalidRequest, match="holds range 1/2 of the model: connect to the server of range 0"):
        make_core(part=SECOND).register("ann", LAYOUT, 0.0)
    with pytest.raises(InvalidRequest, match="this server leads"):
        make_core(part=Range(0, 2)).register("ann", LAYOUT, 0.0, leader=leader())
    with pytest.raises(InvalidRequest, match="this server leads"):
        make_core().register("ann", LAYOUT, 0.0, leader=leader())


def test_a_registration_may_be_repeated() -> None:
    core = started()
    commit(core, "a" * 32, 1, 1.0)
    again = core.register("ann", LAYOUT, 1.0, leader=leader())
    assert (again.lease_id, again.ended, again.must_initialize) == ("a" * 32, None, False)
    assert core.leases.get("a" * 32).sequence == 1


def test_a_new_lease_replaces_the_old_one_of_the_same_worker() -> None:
    core = started()
    again = core.register("ann", LAYOUT, 1.0, leader=leader("b" * 32))
    assert again.ended is not None
    assert (again.ended.lease_id, again.ended.reason) == ("a" * 32, EndReason.REPLACED)


def test_a_lease_that_has_ended_does_not_begin_again() -> None:
    """Its registration may arrive once more, late: the worker's moment would be zero, and nobody would notice."""
    core = started()
    core.leave("a" * 32)
    with pytest.raises(LeaseEnded):
        core.register("ann", LAYOUT, 1.0, leader=leader())
    assert not core.leases.live


def test_a_lease_id_belongs_to_one_worker() -> None:
    core = started()
    with pytest.raises(InvalidRequest, match="another worker holds a lease of this id"):
        core.register("bob", LAYOUT, 1.0, leader=leader())
    with pytest.raises(PermissionDenied):
        core.register("ann", LAYOUT, 1.0, owner="somebody", leader=leader("b" * 32))
    assert list(core.leases.live) == ["a" * 32]


def test_without_a_model_a_range_follows_the_leader_to_another_run() -> None:
    core = make_core(part=SECOND)
    core.register("ann", LAYOUT, 0.0, leader=leader())
    registration = core.register("bob", LAYOUT, 1.0, leader=leader("b" * 32, "another run"))
    assert core.run_id == "another run"
    assert [(ended.worker, ended.reason) for ended in core.pop_ended_leases()] == [("ann", EndReason.ROLLED_BACK)]
    assert registration.must_initialize, "the worker of the lost run was to initialise the range"


def test_with_a_model_a_range_stays_with_its_run() -> None:
    core = started()
    with pytest.raises(InvalidRequest, match="range of run run, and the leader belongs to run another run"):
        core.register("bob", LAYOUT, 1.0, leader=leader("b" * 32, "another run"))
    assert list(core.leases.live) == ["a" * 32]


def test_all_servers_have_the_same_hyperparameters() -> None:
    core = make_core(Hyperparameters(learning_rate=0.1), part=SECOND)
    with pytest.raises(SettingsDiffer, match=r"learning_rate 0\.05 there, 0\.1 here\): give all servers the same options"):
        core.register("ann", LAYOUT, 0.0, leader=leader())
    assert not core.leases.live


def test_the_optimizer_that_a_worker_brings_counts_on_every_range() -> None:
    choice = OptimizerChoice("adamw", "", 0.001, 0.1, Schedule("cosine", 10, 0.1, 90, 0.0))
    first, second = make_core(part=Range(0, 2)), make_core(part=SECOND)
    lease = first.register("ann", LAYOUT, 0.0, choice=choice).lease_id
    second.register("ann", LAYOUT, 0.0, choice=choice, leader=leader(lease, settings=first.settings))
    assert second.settings == first.settings != Hyperparameters()
    assert Schedule.of(second.settings) == choice.schedule


def test_the_model_must_be_the_runs_and_large_enough() -> None:
    core = started()
    with pytest.raises(LayoutMismatch):
        core.register("bob", Layout.of({"w": (20_001,)}), 0.0, leader=leader("b" * 32))
    with pytest.raises(InvalidRequest, match="too small for 2 servers"):
        make_core(part=SECOND).register("ann", Layout.of({"w": (8191,)}), 0.0, leader=leader())


def test_a_range_takes_a_later_sequence() -> None:
    core = started()
    commit(core, "a" * 32, 1, 1.0)
    commit(core, "a" * 32, 4, 1.0)
    for early in (2, 3):
        with pytest.raises(SequenceGap):
            core.admit(header(core, "a" * 32, early), 0.0)
    send(core, header(core, "a" * 32, 5), 1.0)
    with pytest.raises(SequenceGap, match="still waits"):
        core.admit(header(core, "a" * 32, 6), 0.0)


def test_a_restarted_range_does_not_take_a_gap_for_lost_commits() -> None:
    core = started()
    commit(core, "a" * 32, 1, 1.0)
    core.mark_restarted(None)
    commit(core, "a" * 32, 3, 1.0)
    core.mark_restarted(None)
    with pytest.raises(LeaseEnded, match="restarted without this worker's last commit"):
        core.admit(replace(header(core, "a" * 32, 4), base_version=1), 0.0)


def test_a_range_that_is_older_than_a_worker_knows_says_so_and_keeps_the_lease() -> None:
    """It has a log: no crash loses what a worker knows. Ending the lease alone would let the worker train on."""
    core = started()
    commit(core, "a" * 32, 1, 1.0)
    core.mark_restarted(None)
    late = replace(header(core, "a" * 32, 4), base_version=core.central.version + 3)
    with pytest.raises(InvalidRequest, match=r"older than its workers know: version 4 then, 1 now.*gem-ctl reshard"):
        core.admit(late, 0.0)
    assert list(core.leases.live) == ["a" * 32]


def test_a_rejected_part_leaves_its_range_as_it_was() -> None:
    core = started()
    assert core.rejected("a" * 32, NonFiniteGradient("NaN")) is None
    commit(core, "a" * 32, 2, 1.0)
    assert core.central.version == 1
