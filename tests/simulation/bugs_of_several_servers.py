"""Bugs to be planted in runs of several servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from gem_server.core import checks
from gem_server.core.commits import Step
from gem_server.core.leases import LeaseTable
from gem_server.core.shards import ShardLedger
from gem_server.core.state_machine import Core
from gem_server.core.values import Applied, LeaderRegistration, Registration
from gem_server.durability import recovery
from gem_server.durability.write_order import WriteOrder
from gem_server.rules import PiStatistics
from simulation.backup import Backup
from simulation.client import Client, Request
from simulation.machine import Machine
from simulation.planting import planted

# -- in a session with several servers


@planted(servers=2)
def takes_a_commit_for_done_once_the_leader_has_answered(patch: pytest.MonkeyPatch) -> None:
    """The shard is completed before the other ranges have the commit."""
    all_answered = Client.all_answered

    def hasty(client: Client, request: Request) -> bool:
        if request.kind == "commit" and not request.index:
            client.waiting.clear()
            return True
        return all_answered(client, request)

    patch.setattr(Client, "all_answered", hasty)


@planted(servers=3, seed=29)
def registers_again_only_where_the_lease_ended(patch: pytest.MonkeyPatch) -> None:
    """It goes on with the old sequence there, and sends the commit that was under way once more."""
    patch.setattr(LeaseTable, "require_not_ended", lambda leases, lease_id: None)
    register_again = Client.register_again

    def here_alone(client: Client, ended: list[int], kind: str) -> None:
        if 0 in ended or kind != "commit":
            register_again(client, ended, kind)
        else:
            client.registered = min(ended)

    patch.setattr(Client, "register_again", here_alone)


@planted(servers=3, seed=1)
def asks_for_the_last_range_first(patch: pytest.MonkeyPatch) -> None:
    """A peer gets its first value before the run is on the leader's disk."""
    patch.setattr(Client, "next_to_enter", lambda client: len(client._parts) - 1 - client.entered)


@planted(servers=3, seed=3)
def counts_a_batch_that_a_range_has_rejected(patch: pytest.MonkeyPatch) -> None:
    after_commit = Client._after_commit

    def careless(client: Client) -> None:
        client._errors = {}
        after_commit(client)

    patch.setattr(Client, "_after_commit", careless)


@planted(servers=3, seed=18)
def gives_up_if_a_peer_knows_another_run(patch: pytest.MonkeyPatch) -> None:
    """It does not ask the leader again, which may have begun another run since: workers are slow here to go on to the peers."""
    patch.setattr(Client, "_after_register", _giving_up(Client._after_register))
    requests = Client.requests

    def slow(client: Client) -> list[Request]:
        return requests(client) if client.registered != 1 or client._random.random() < 0.05 else []

    patch.setattr(Client, "requests", slow)


def _giving_up(after_register: Callable[[Client], None]) -> Callable[[Client], None]:
    def giving_up(client: Client) -> None:
        after_register(client)
        if client._refused is not None:
            client._stop(client._refused)

    return giving_up


# -- in one of several servers


@planted(servers=2, seed=1)
def tells_of_a_first_value_before_it_is_saved(patch: pytest.MonkeyPatch) -> None:
    """Workers go on to the peers, and a crash of the leader then ends the run that those belong to."""
    patch.setattr(WriteOrder, "begin", lambda order: None)


@planted(servers=2, seed=15)
def takes_part_in_any_run(patch: pytest.MonkeyPatch) -> None:
    """A peer with a model takes workers of another run."""
    patch.setattr(checks, "require_known_run", lambda leader, run_id: None)


@planted(servers=2, seed=8)
def makes_lease_ids_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """A peer opens a lease under another id than the leader."""
    register = Core.register

    def independent(core: Core, *args: object, leader: LeaderRegistration | None = None, **options: object) -> Registration:
        own = replace(leader, lease_id=f"{leader.lease_id}-{core.part.index}") if leader else None
        return register(core, *args, leader=own, **options)  # type: ignore[arg-type, misc]

    patch.setattr(Core, "register", independent)


@planted(servers=3, seed=29)
def counts_commits_instead_of_keeping_their_sequence(patch: pytest.MonkeyPatch) -> None:
    """After a gap, the same sequence is taken twice."""
    finish = Core.finish

    def counting(core: Core, step: Step, pi: PiStatistics | None, now: float) -> Applied:
        before = step.commit.lease.sequence
        applied = finish(core, step, pi, now)
        step.commit.lease.sequence = before + 1
        return applied

    patch.setattr(Core, "finish", counting)


@planted(servers=3, seed=3)
def allows_no_gaps(patch: pytest.MonkeyPatch) -> None:
    require_due = checks.require_due
    patch.setattr(checks, "require_due", lambda lease, sequence, gaps: require_due(lease, sequence, False))


@planted(servers=2)
def keeps_the_shards_of_a_lease_that_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardLedger, "release", lambda ledger, lease_id, but=(): 0)


@planted(servers=2, seed=1)
def replies_before_the_flush_at_one_range(patch: pytest.MonkeyPatch) -> None:
    awaits = Machine.awaits
    patch.setattr(Machine, "awaits", lambda machine, log, number: not machine.setup.part.index and awaits(machine, log, number))


@planted(servers=2)
def resumes_from_a_checkpoint_without_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "replay", lambda directory, state, *_: (state.log.number, None, None))


# -- in a backup in mid-training


@planted(servers=2, seed=8)
def copies_the_leader_last(patch: pytest.MonkeyPatch) -> None:
    """It counts commits as done that the other ranges' copies do not have."""
    patch.setattr(Backup, "order", lambda backup, ranges: [ranges[1:], ranges[:1]])


@planted(servers=2, seed=36)
def copies_all_ranges_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backup, "order", lambda backup, ranges: [ranges])


@planted(servers=2)
def restores_no_held_shards(patch: pytest.MonkeyPatch) -> None:
    """What workers held as the leader was copied is never dealt again."""
    restore = ShardLedger.restore
    patch.setattr(ShardLedger, "restore", lambda ledger, state: restore(ledger, replace(state, held=[])))
