"""A worker's registration: what it is checked for, and what it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gem_api.layout import Layout

from gem_server.core import checks
from gem_server.core.leases import Lease
from gem_server.core.optimizer_choice import Choice, adopted, require_agreement
from gem_server.core.records import Kind, Record
from gem_server.core.values import Ended, EndReason, LeaderRegistration, Registration

if TYPE_CHECKING:
    from gem_server.core.state_machine import Core


def register(
    core: Core, worker: str, layout: Layout, now: float, overlap: bool = False, owner: str = "", choice: Choice = None,
    leader: LeaderRegistration | None = None,
) -> Registration:  # fmt: skip
    """Opens a lease. On a server that does not lead, this may be repeated.

    Args:
        core: The state machine.
        worker: The worker's name.
        layout: Its whole model's tensors.
        now: Seconds of the caller's clock.
        overlap: Whether it computes its next gradient while a commit is under way; it needs a second snapshot then.
        owner: Names its credentials; empty if the server asks for none.
        choice: The optimizer that it brings; None: it brings none.
        leader: What the server of range 0 answered; None on that server itself.

    Raises:
        InvalidRequest: The worker's name is empty, too long or not printable; the rule can't train this layout; or the leader
            has another run.
        SettingsDiffer: The leader has other hyper-parameters.
        LeaseEnded: The lease that the leader gave has ended here already.
        PermissionDenied: A worker with other credentials holds the name.
        LayoutMismatch: The worker's model is not the run's.
        Overloaded: There is no memory for another worker.
        Quarantined: Too many of its gradients were rejected.
    """
    checks.require_valid_name(worker)
    core.quarantine.require_free(worker)
    predecessor = core.leases.named(worker)
    checks.require_same_owner(predecessor, worker, owner)
    checks.require_shown(core.part, leader)
    layout = layout.part(core.part)
    if leader is not None:
        checks.require_usable_id(core.leases, leader, worker)
        if predecessor is not None and predecessor.lease_id == leader.lease_id:
            return _registered(core, predecessor, None)
        _follow(core, leader)
        predecessor = core.leases.named(worker)
    new = not core.central.initialized and _alone(core, predecessor)
    if new:
        settings = adopted(core.started_with, core.stated, choice)
    else:
        settings = core.settings
        require_agreement(settings, choice, core.stated)
        core.central.require_fitting(layout)
    rule = core.rule if settings == core.settings else checks.rule_for_worker(settings)
    checks.require_trainable(rule, layout)
    if leader is not None:
        checks.require_same_settings(leader, settings)
    with core.memory.under(rule):
        core.memory.require_room_for_worker(layout, overlap, freed=predecessor)
        theta, buffers = core.memory.take(layout, overlap)
    ended = core.end_lease(predecessor, EndReason.REPLACED) if predecessor else None
    core.settle(settings, rule)
    core.central.adopt(layout, theta)
    lease_id = core.leases.new_id() if leader is None else leader.lease_id
    lease = core.leases.open(lease_id, worker, buffers, now, owner)
    lease.starting = True
    core.record(Record(Kind.OPENED, {"lease": lease_id, "worker": worker, "overlap": overlap, "owner": owner}))
    core.gathering.joined(len(core.leases.live), now)
    core.elect_initializer()
    return _registered(core, lease, ended)


def _registered(core: Core, lease: Lease, ended: Ended | None) -> Registration:
    assert core.central.layout is not None
    must_initialize = core.central.initializer == lease.lease_id
    return Registration(lease.lease_id, core.central.layout, must_initialize, core.steps_done.get(lease.worker, 0), ended)


def _follow(core: Core, leader: LeaderRegistration) -> None:
    """Takes part in the leader's run. Without a model, this server drops the leases of another run: the leader has lost it."""
    if core.central.initialized:
        checks.require_known_run(leader, core.run_id)
    elif leader.run_id != core.run_id:
        core.ended_leases += core.end_unfit(lambda lease: True)
        core.run_id = leader.run_id


def _alone(core: Core, predecessor: Lease | None) -> bool:
    """Whether no worker except the predecessor is in the run."""
    return core.leases.live.keys() <= ({predecessor.lease_id} if predecessor else set())
