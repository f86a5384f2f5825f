"""The replies that are held, and what they become when they are released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gem_api.errors import RuleFailed

from gem_server.core import arithmetic
from gem_server.core.commits import Step
from gem_server.core.leases import Lease
from gem_server.core.records import Kind, Record
from gem_server.core.rendezvous import Rendezvous
from gem_server.core.state_machine import Core

WAIT_ROUNDS = 200  # replies wait in a run's first rounds alone: later they would gain nothing
MAX_WAIT_LEASES = 0.1  # lease durations that a reply waits at most
MAX_WAIT_SECONDS = 5.0  # seconds that a reply waits at most: far below the 60 after which clients and networks give up


class Releases:
    """Holds the replies of a run's workers. A restart holds none: what was held gets its reply when it is asked for again."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timetable = core.leases.timetable
        self._rendezvous = Rendezvous(self._timetable, most=min(MAX_WAIT_LEASES * core.leases.duration, MAX_WAIT_SECONDS))
        self._aheads: dict[str, float] = {}  # of the leases whose replies are held: how far they will lie ahead of θ
        self._source = ("", 0.0)  # the lease of the last commit, and how far its snapshot lies ahead of θ

    def applied(self, step: Step, now: float) -> bool:
        """Decides whether the reply to a commit is held, right after `Core.finish`. Ask `due` afterwards."""
        if not step.accepted:
            return False
        core, lease = self._core, step.commit.lease
        self._source = lease.lease_id, core.rule.ahead(step.rule_input)
        if core.rounds >= WAIT_ROUNDS or lease.overlaps or lease.lease_id not in core.leases.live:
            return False
        self._rendezvous.wait = core.settings.reply_wait
        if not self._rendezvous.hold(lease.lease_id, now):
            return False
        self._timetable.interrupted(lease.lease_id)
        self._aheads[lease.lease_id] = core.rule.ahead(step.rule_input, released=True)
        return True

    def due(self, now: float) -> list[str]:
        """The leases whose replies are to be released now. They wait no longer for others, but for `plan`."""
        due = self._rendezvous.due(now)
        for lease_id in due:
            self._core.shares.begin(lease_id, now)
        return due

    def next_look(self, now: float) -> float | None:
        """The time at which to ask `due` again, if nothing happens before; None if nobody waits."""
        return self._rendezvous.next_look(now)

    def release(self, lease_id: str, now: float) -> bool:
        """A lease's reply is to be released now, whoever is expected. Returns whether it waited for others."""
        waited = self._rendezvous.end(lease_id)
        if waited:
            self._core.shares.begin(lease_id, now)
        return waited

    def forget(self, lease_id: str) -> None:
        """A reply that was held is made, or will not be."""
        self._rendezvous.end(lease_id)
        self._aheads.pop(lease_id, None)

    def plan(self, lease_ids: Sequence[str]) -> Callable[[], None]:
        """Plans the replies of leases; call it between two commits. The returned function makes them. Those that were forgotten
        or whose lease has ended get none. Nobody may be told of a reply before the record of it is on the disk."""
        core, (source_id, ahead) = self._core, self._source
        source = core.leases.live.get(source_id) if ahead else None
        leases = [
            core.leases.live[lease_id] for lease_id in lease_ids if lease_id in self._aheads and lease_id in core.leases.live
        ]
        leases.sort(key=lambda lease: lease is source)  # the others' replies are made from its snapshot as it is
        if not leases:
            return _nothing
        ratios = [(lease, self._aheads.pop(lease.lease_id) / ahead if source is not None else 0.0) for lease in leases]
        if leases[-1] is source:
            self._source = source_id, ratios[-1][1] * ahead
        fields = {
            "leases": [[lease.lease_id, ratio] for lease, ratio in ratios],
            "source": source.lease_id if source is not None else "",
            "version": core.central.version,
        }
        number = core.record(Record(Kind.RELEASED, fields))
        for lease in leases:
            lease.recorded = number
        return partial(release, core, ratios, source)


def release(core: Core, ratios: Sequence[tuple[Lease, float]], source: Lease | None) -> None:
    """Makes the replies of leases, each with its ratio: see `UpdateRule.release`."""
    rule, theta = core.rule, core.central.theta
    snapshot = source.buffers["snapshot"] if source is not None else None
    for lease, ratio in ratios:
        lease.about_to_change()
        undone = arithmetic.undone_if_rule_raises(rule, core.settings.rule, theta, core.shared, lease)
        with suppress(RuleFailed), undone:  # its reply is then the one of its commit; in a replay the rule raises too
            rule.release(theta, lease.buffers_and_reply(), snapshot, ratio)
            lease.base_version = lease.spare_version = core.central.version
            lease.reply_progress = core.central.progress


def _nothing() -> None: ...
