"""The simulated server of one range: what a lead or a peer serves beside what every server does."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from gem_api.errors import GemError, LeaseEnded, RejectedCommit, SequenceGap
from gem_server.core.facts import LeadsAnswer
from gem_server.durability import checkpoint
from gem_server.durability.manifest import Entry, kept_checkpoints
from gem_server.intake.hold import Hold
from gem_server.rpc.range_checkpoint import RangeCheckpoint
from simulation.client import Request, Response
from simulation.machine import Machine
from simulation.ranges_truth import Everywhere, RangeTruth
from simulation.server import Held


class Path:
    """Stands for a server's `CommitPath`, as far as commits are held back."""

    def __init__(self, machine: RangeMachine) -> None:
        self._machine = machine

    @property
    def hold(self) -> Hold[Held]:
        return self._machine.server.hold

    def require_open(self) -> None: ...

    def begin_hold(self) -> dict[str, int]:
        return self.hold.begin(self._machine.server.core.leases, self._machine.now)

    def release_up_to(self, cut: Mapping[str, int]) -> None:
        self._machine.go_on(self.hold.release_up_to(cut))

    def end_hold(self, number: int) -> None:
        self._machine.go_on(self.hold.end(number))


class RangeMachine(Machine):
    """The server of one range.

    Attributes:
        everywhere: What all ranges have promised together.
    """

    changes_settings = False  # or all ranges would have to
    everywhere: Everywhere

    # -- calls

    def refuse(self, request: Request, error: GemError) -> None:
        if request.kind == "commit" and isinstance(error, RejectedCommit) and not isinstance(error, SequenceGap):
            lease_id, sequence = request.fields["lease"], request.fields["sequence"]
            self.everywhere.rejected.add(((lease_id, sequence), self.setup.part.index))
            lease = self.server.core.leases.live.get(lease_id)
            if lease and sequence == max(lease.sequence, lease.rejected) + 1:  # as `CommitPath` does
                lease.rejected = sequence
        super().refuse(request, error)

    def _serve_register(self, request: Request, overlap: bool, lead: LeadsAnswer | None = None) -> None:
        core, setup = self.server.core, self.setup
        try:
            joined = core.register(request.worker, setup.layout, self.now, overlap, choice=setup.choice, lead=lead)
        finally:
            core.pop_ended_leases()
        self._answer(request, (joined, LeadsAnswer(joined.lease_id, core.run_id, core.settings)))

    def _serve_renew(self, request: Request, lease: str) -> None:
        self.server.core.renew(lease, self.now)
        if request.operation:  # not from the background
            self._answer(request, None)

    def _serve_complete(self, request: Request, lease: str, shard: int) -> None:
        held = self.server.core.ledger.held
        before = shard in held
        super()._serve_complete(request, lease, shard)
        if before and shard not in held:
            self.everywhere.completes(lease, shard)

    # -- checkpoints over all ranges

    def _serve_begin(self, request: Request) -> None:
        self._begin_job(request, self._ranged().begin())

    def _serve_create(self, request: Request, cut: Mapping[str, int]) -> None:
        self._begin_job(request, self._ranged().write(cut))

    def _serve_manifest(self, request: Request, entries: Sequence[Entry], cut: Mapping[str, int]) -> None:
        self._begin_job(request, self._ranged().write_manifest(entries, cut, complete=False))

    def _ranged(self) -> RangeCheckpoint:
        return RangeCheckpoint(self.server.core, Path(self), self.checkpointer())  # type: ignore[arg-type]

    def _begin_job(self, request: Request, job: Coroutine[Any, Any, object]) -> None:
        self.server.jobs.append((request, job))

    def work(self) -> None:
        """The next step of one of the calls that take long."""
        if not self.server.jobs:
            return
        request, job = self.random.choice(self.server.jobs)
        try:
            job.send(None)
        except StopIteration as returned:
            self.server.jobs.remove((request, job))
            self.network.append(Response(request, returned.value))
        except GemError as error:
            self.server.jobs.remove((request, job))
            self.refuse(request, error)

    def go_on(self, commits: Iterable[Held]) -> None:
        """Gives commits that were held back their tickets."""
        for held in commits:
            try:
                ticketed = self.server.core.ticket(held.lease, held.header, self.now, held.arrived)
                self.server.queue.append(ticketed)
            except GemError as error:
                self.refuse_all(held.header, error)

    def expire(self, most: float = 20) -> None:
        super().expire(most)
        hold = self.server.hold
        for held in hold.drop_ended(self.server.core.leases):
            self.refuse_all(held.header, LeaseEnded("ended while it was held back"))
        if hold.overdue(self.now):
            self.go_on(hold.end(hold.active))

    # -- disasters

    def _damage_a_checkpoint(self) -> None:
        found, checkpointer = checkpoint.list_checkpoints(self.disk.root), self.server.checkpointer
        named = kept_checkpoints(self.disk.root, self.setup.part.index) | {checkpointer._of_all_ranges if checkpointer else ""}
        if found and found[0].name not in named:  # a manifest may name it: nothing could replace it then
            super()._damage_a_checkpoint()

    def lose_disk(self) -> None:
        """The folder is gone for ever, and a server starts with an empty one."""
        index = self.setup.part.index
        self.everywhere.wiped.add(index)
        self.truth = self.everywhere.ranges[index] = RangeTruth()
        self.disk.wipe()
        self.crash()
