"""Bugs to be planted in runs whose replies wait for others' commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from gem_server import apply_loop
from gem_server.core import releases
from gem_server.core.leases import Lease, LeaseTable
from gem_server.core.releases import Releases
from gem_server.core.values import EndReason
from gem_server.durability import replay
from simulation.machine import Machine
from simulation.planting import planted


@planted(servers=1, seed=126)
def sends_a_held_reply_before_its_record_is_on_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Only the record of its commit is waited for."""
    plan = Releases.plan

    def hasty(held: Releases, lease_ids: Sequence[str]) -> Callable[[], None]:
        live = held._core.leases.live
        before = {lease_id: live[lease_id].recorded for lease_id in lease_ids if lease_id in live}
        work = plan(held, lease_ids)
        for lease_id, recorded in before.items():
            live[lease_id].recorded = recorded
        return work

    patch.setattr(Releases, "plan", hasty)


@planted(servers=1, seed=29)
def makes_held_replies_for_a_checkpoint_to_wait_for_on_the_event_loop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(apply_loop, "runs_inline", lambda core, lease: True)


@planted(servers=1, seed=29)
def makes_the_held_reply_of_a_lease_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    """It is not given up, and the log tells of a reply to nobody."""
    plan, end, ended = Releases.plan, LeaseTable.end, dict[str, Lease]()

    def remembers(table: LeaseTable, lease: Lease, reason: EndReason) -> None:
        ended[lease.lease_id] = lease
        end(table, lease, reason)

    def for_all(held: Releases, lease_ids: Sequence[str]) -> Callable[[], None]:
        live = held._core.leases.live
        gone = {lease_id: ended[lease_id] for lease_id in lease_ids if lease_id not in live}
        live.update(gone)
        try:
            return plan(held, lease_ids)
        finally:
            for lease_id in gone:
                del live[lease_id]

    patch.setattr(LeaseTable, "end", remembers)
    patch.setattr(Releases, "plan", for_all)
    patch.setattr(Machine, "give_up_ended", lambda machine, lease_id: None)


@planted(servers=1, seed=65)
def replays_no_release(patch: pytest.MonkeyPatch) -> None:
    """A worker's snapshot would be the one of its commit, one might think."""
    patch.setattr(replay, "_released", lambda core, fields: None)


@planted(servers=1, seed=149)
def replays_a_release_from_theta_alone(patch: pytest.MonkeyPatch) -> None:
    """The replies of `gem` around an optimizer lie ahead of θ."""
    patch.setattr(
        replay, "release", lambda core, ratios, source: releases.release(core, [(each, 0.0) for each, _ in ratios], None)
    )
