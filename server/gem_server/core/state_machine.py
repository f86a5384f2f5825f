"""The core: what the server decides. No gRPC, no clock, no files; `now` is passed in, facts are returned.

One thread calls it. The exception is `Step.run`, the arithmetic of one commit, which the apply loop runs in a thread of
its own between `begin` and `finish`; nothing else touches θ or a worker's buffers meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from gem_api.errors import (
    GemError,
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    PermissionDenied,
    RuleFailed,
    SequenceGap,
    UnknownRegion,
)
from gem_api.hyperparameters import FIXED, Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.region import Region
from gem_api.schedule import factor

from gem_server.core.central_variable import CentralVariable, Copy
from gem_server.core.commits import Arrived, Commit, Step, as_floats
from gem_server.core.facts import (
    Admission,
    Applied,
    Ended,
    EndReason,
    Header,
    Outcome,
    PullDecision,
    Registration,
)
from gem_server.core.leases import REPLY, SPARE, Lease, LeaseTable
from gem_server.core.memory_budget import Memory
from gem_server.core.norm_bound import NormHistory
from gem_server.core.quarantine import Quarantine
from gem_server.core.shards import NoShard, Shard, ShardLedger
from gem_server.durability.records import Kind, Record, Recorder, forget
from gem_server.rules import PiFacts, RuleInput, Shared, is_users, rule_of, where_raised

MAX_SAMPLES = 1 << 32  # in one commit
MAX_NAME = 128
MAX_SHARDS = 1000  # held by one worker at once
MAX_COUNTED_NAMES = 10_000  # whose steps are counted: a run that never ends meets new names without end


class Core:
    """The central variable, the leases, the shard ledger and the rule, as one state machine.

    Args:
        run_id: Names the run.
        settings: The run's hyper-parameters; ValueError where they mean nothing.
        lease_seconds: How long a lease lives without a sign of life.
        memory_limit: Bytes that may be held for θ, its copies and the workers; 0 for no limit.
        min_workers: No shard is handed out before so many workers have been in the run at once.
        new_id: Makes lease ids that cannot be guessed.
        norms: Judges the norms of gradients; without it they are not looked at.
        quarantine: Keeps out workers whose gradients are refused; without it nobody is kept out.

    Attributes:
        steps_done: Commits by worker's name, of the 10,000 names that committed last, the latest at the end. A worker that
            comes back after so many others begins at 0, and so has its limit of steps (`--steps`) once more.
        record: Told of everything that changes the run once θ has its first value, in the order in which it happens.
        logged: Whether what it is told goes to a log, for which gradients must not change under way.
    """

    def __init__(
        self,
        run_id: str,
        settings: Hyperparameters,
        *,
        lease_seconds: float,
        memory_limit: int,
        new_id: Callable[[], str],
        min_workers: int = 1,
        norms: NormHistory | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.run_id = run_id
        self.settings = settings
        self._min_workers = min_workers
        self._begun = False
        settings.require_valid()
        self.rule = rule_of(settings)
        _require_windows_fit(settings)
        self.central = CentralVariable()
        self.shared = Shared(numbers=dict(self.rule.numbers))
        self.leases = LeaseTable(lease_seconds, new_id)
        self.memory = Memory(memory_limit, self.rule, self.central, self.leases)
        self.record: Recorder = forget
        self.logged = False
        self.ledger = ShardLedger(settings)
        self.norms = norms or NormHistory()
        self.quarantine = quarantine or Quarantine()
        self.next_ticket = 1
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.steps_done: dict[str, int] = {}
        self.samples_committed = 0
        self._rolled_back: list[Ended] = []

    def change(self, settings: Hyperparameters) -> None:
        """Goes on with other settings. Raises ValueError where one is changed that is `FIXED`, or where they mean nothing."""
        if changed := [name for name in FIXED if getattr(settings, name) != getattr(self.settings, name)]:
            raise ValueError(f"a run can't change its {', '.join(changed)}")
        settings.require_valid()
        self.settings = settings
        self.rule = self.memory.rule = rule_of(settings)
        self.ledger.change(settings)

    # -- joining and leaving

    def register(self, worker: str, layout: Layout, now: float, overlap: bool = False, owner: str = "") -> Registration:
        """Opens a lease; a worker that computes while a commit is under way needs `overlap`. `owner` names its credentials.

        Raises:
            InvalidRequest: The worker's name is empty, too long or not printable.
            PermissionDenied: A worker with other credentials has the name.
            LayoutMismatch: The worker's model is not the run's.
            Overloaded: There is no memory for another worker.
            Quarantined: Too many of its gradients were refused.
        """
        if not 0 < len(worker) <= MAX_NAME or not worker.isprintable():
            raise InvalidRequest(f"a worker name has 1 to {MAX_NAME} printable characters")
        self.quarantine.require_free(worker)
        predecessor = self.leases.named(worker)
        if predecessor is not None and predecessor.owner != owner:
            raise PermissionDenied(
                f"{worker!r} is in the run with another credential: take another name, or wait until it has left"
            )
        alone = self.leases.live.keys() <= ({predecessor.lease_id} if predecessor else set())
        if self.central.initialized or not alone:
            self.central.require_fitting(layout)
        self.memory.require_room_for_worker(layout, overlap, freed=predecessor)
        theta, buffers, upload = self.memory.take(layout, overlap)
        ended = self._end(predecessor, EndReason.REPLACED) if predecessor else None
        self.central.adopt(layout, theta)
        lease_id = self.leases.new_id()
        self.leases.open(lease_id, worker, buffers, upload, now, owner).starting = True
        self.record(Record(Kind.OPENED, {"lease": lease_id, "worker": worker, "overlap": overlap, "owner": owner}))
        self._begun = self._begun or not self.workers_awaited
        self._elect_initializer()
        must_initialize = self.central.initializer == lease_id
        return Registration(lease_id, layout, must_initialize, self.steps_done.get(worker, 0), ended)

    def reopen(self, lease_id: str, worker: str, overlap: bool, owner: str, now: float) -> None:
        """Opens a lease that the log tells of. Raises Overloaded."""
        layout = self.central.layout
        assert layout is not None
        _, buffers, upload = self.memory.take(layout, overlap)
        self.leases.open(lease_id, worker, buffers, upload, now, owner)

    def came_back(self, shard_ids: int | None) -> None:
        """The server has started again with this run. It may lack commits that workers were told are applied: a start without a
        log may have come before it and left no trace. `admit` ends the leases of which that shows.

        Args:
            shard_ids: Where shards may have been dealt that this run does not know of: a random number, from which shards get
                ids that none of those has.
        """
        for lease in self.leases.live.values():
            lease.restored = True
        if shard_ids is not None:
            self.ledger.number_anew(shard_ids)

    def renew(self, lease_id: str, now: float) -> Lease:
        return self.leases.renew(lease_id, now)

    def leave(self, lease_id: str, reason: EndReason = EndReason.LEFT) -> Ended:
        return self._end(self.leases.get(lease_id), reason)

    def expire(self, now: float) -> list[Ended]:
        """Ends the leases whose time is up."""
        return [self._end(lease, EndReason.EXPIRED) for lease in self.leases.expired(now, self.central.initializer)]

    def end_unfit(self, unfit: Callable[[Lease], bool]) -> list[Ended]:
        """After a restart: ends the leases of workers that can't go on as they are."""
        return [self._end(lease, EndReason.ROLLED_BACK) for lease in filter(unfit, list(self.leases.live.values()))]

    def take_rolled_back(self) -> list[Ended]:
        """The leases that `admit` has ended since this was last asked."""
        taken, self._rolled_back = self._rolled_back, []
        return taken

    def _end(self, lease: Lease, reason: EndReason) -> Ended:
        self.leases.end(lease, reason)
        self.record(Record(Kind.ENDED, {"lease": lease.lease_id, "reason": reason}))
        if self.central.initializer == lease.lease_id:
            self.central.initializer = None
        if not self.leases.live and not self.central.initialized:
            self.central.forget_layout()
        self._elect_initializer()
        return Ended(lease.lease_id, lease.worker, reason, self.ledger.release(lease.lease_id))

    # -- the first value

    def _elect_initializer(self) -> None:
        """Asks the oldest live worker for θ's first value, unless one is asked already."""
        if not self.central.initialized and self.central.initializer is None:
            self.central.initializer = next(iter(self.leases.live), None)

    def require_initializer(self, lease_id: str, now: float) -> Lease:
        """The lease of the worker that may give θ its first value. Raises InvalidRequest if that is another."""
        lease = self.leases.renew(lease_id, now)
        if self.central.initialized or self.central.initializer != lease_id:
            raise InvalidRequest("this worker was not asked to initialise the central variable: pull it instead")
        return lease

    def initialized(self) -> None:
        """The first value has arrived, whole. Raises Overloaded where there is no memory for what the rule shares."""
        self.shared.buffers = self.memory.take_shared()
        self.central.start()

    # -- reading θ

    def pull_decision(self, lease_id: str, now: float) -> PullDecision:
        self.leases.renew(lease_id, now)
        if self.central.initialized:
            return PullDecision.READY
        return PullDecision.INITIALIZE if self.central.initializer == lease_id else PullDecision.WAIT

    def plan_pull(self, lease: Lease) -> Callable[[], int]:
        """Between two commits: what gives the worker the present θ, in its own answer buffer, and returns the version."""
        if lease.lease_id in self.leases.live:
            self.record(Record(Kind.PULLED, {"lease": lease.lease_id, "version": self.central.version}))
        return partial(self.pull, lease)

    def pull(self, lease: Lease) -> int:
        """As `plan_pull` says. Raises RuleFailed where a user's rule does not get that far."""
        lease.about_to_change()
        pull = self.rule.pull if lease.sequence else self.rule.first_pull
        with self._undone_if_rule_raises(lease):
            pull(self.central.theta, lease.buffers)
        lease.base_version = lease.spare_version = self.central.version
        if lease.overlaps:
            np.copyto(lease.buffers[SPARE], lease.buffers["snapshot"])
        return lease.base_version

    def reply(self, lease: Lease) -> Vector:
        """The θ that the worker computes its next gradient on: float32, shape (P,)."""
        return lease.buffers[self.rule.reply_buffer]

    def resend_reply(self, lease: Lease) -> None:
        """A commit is repeated: puts its answer into the worker's shared memory once more. Call it between two commits."""
        if lease.shared_reply is not None:
            np.copyto(lease.shared_reply, self.reply(lease))

    # -- memory shared with a worker on this machine

    def offer_region(self, lease_id: str, region: Region) -> None:
        """Keeps a region that is being handed to the lease's worker, until a commit names it; `memory` counts it already.
        Raises LeaseEnded."""
        self.leases.get(lease_id).offered = region

    def adopt_region(self, lease: Lease, nonce: bytes) -> None:
        """A commit names the region that it lies in: from now on the lease's gradients and answers lie there.

        Raises:
            UnknownRegion: It is not the lease's.
        """
        region = lease.offered
        if region is not None and nonce == region.nonce:
            lease.adopt(region, copied=self.logged or self.norms.bounded or not self.rule.reads_once)
            self.leases.recount(lease)
        elif lease.region is None or nonce != lease.region.nonce:
            raise UnknownRegion("this server does not map that region of shared memory: share memory anew, or send chunks")

    # -- a commit: admit, (receive), ticket, begin, (run), finish

    def admit(self, header: Header, now: float) -> tuple[Admission, Lease]:
        """Judges a commit by its header.

        Raises:
            LeaseEnded: The lease is unknown, has ended, or the server came back without commits which the worker was told are
                applied.
            LayoutMismatch: The fingerprint is not the run's.
            SequenceGap: The sequence is neither the next, nor the queued, nor the last one.
            InvalidRequest: The base version does not exist yet, or it holds what the rule does not take.
            NotInitialized: θ has no value yet.
        """
        lease = self.leases.renew(header.lease_id, now)
        self.central.require_initialized()
        if self.central.layout is None or header.fingerprint != self.central.layout.fingerprint:
            raise LayoutMismatch("the commit's layout fingerprint is not the run's: register with this model first")
        answered = header.sequence == lease.sequence and lease.last_applied is not None
        if answered or header.sequence == lease.queued:
            self.outcomes[Outcome.REPEATED] += 1
            return Admission.REPEATED if answered else Admission.QUEUED, lease
        given = {lease.base_version, lease.spare_version} if lease.overlaps else {lease.base_version}
        if lease.restored and (header.base_version not in given or header.sequence > lease.sequence + 1):
            self._rolled_back.append(self._end(lease, EndReason.ROLLED_BACK))
            raise LeaseEnded("the server came back without this worker's last commit: register again", EndReason.ROLLED_BACK)
        if lease.queued is not None:
            raise SequenceGap(f"commit {header.sequence} of this lease while commit {lease.queued} still waits for its turn")
        if header.sequence != lease.sequence + 1:
            raise SequenceGap(f"commit {header.sequence} of this lease; due is {lease.sequence + 1}")
        if header.samples > MAX_SAMPLES:
            raise InvalidRequest(f"a commit of {header.samples} samples: at most {MAX_SAMPLES} are taken")
        if header.kind != self.rule.kind:
            raise InvalidRequest(
                f"rule {self.settings.rule} with {self.settings.local_steps} local steps takes a {self.rule.kind}, and this "
                f"commit holds a {header.kind}: commit what the registration asked for"
            )
        if header.base_version > self.central.version:
            raise InvalidRequest(f"base version {header.base_version} does not exist: the server is at {self.central.version}")
        return Admission.FRESH, lease

    def ticket(
        self, lease: Lease, header: Header, now: float, arrived: Arrived | None = None, norm: float | None = None
    ) -> Commit:
        """The gradient is in `lease.upload`, whole; `arrived` where it came in another form. Gives the commit its place in the
        FIFO.

        Raises:
            LeaseEnded: The lease has ended meanwhile.
            NormOutOfBounds: The gradient's `norm`, where it is judged, is beyond the bound.
        """
        self.leases.renew(lease.lease_id, now)
        if norm is not None:
            self.norms.judge(norm)
            self.norms.accepted(norm)
        self.quarantine.accepted(lease.worker)
        lease.queued = header.sequence
        commit = Commit(self.next_ticket, lease, header, lease.upload, arrived or as_floats(lease.upload), norm)
        self.next_ticket += 1
        return commit

    def refused(self, lease_id: str, error: GemError) -> Ended | None:
        """A commit of this lease was refused; returns its end where that puts the worker into quarantine."""
        lease = self.leases.live.get(lease_id)
        if lease is None or not self.quarantine.refused(lease.worker, error):
            return None
        return self._end(lease, EndReason.QUARANTINED)

    def begin(self, commit: Commit) -> Step:
        """The commit's turn has come; `Step.run` raises RuleFailed where a user's rule raises, and leaves everything as it was.

        Raises:
            LeaseEnded: The lease has ended while the commit waited.
        """
        lease, layout = self.leases.get(commit.header.lease_id), self.central.layout
        assert layout is not None
        version = self.central.version
        staleness = version - commit.header.base_version
        rule_input = RuleInput(staleness, version, lease.sequence, factor(self.settings, version), self.shared)
        failure = None
        try:
            accepted = bool(self.rule.accepts(rule_input))
        except Exception as error:
            if not is_users(self.rule):
                raise
            accepted, failure = False, self._rule_failed(error)
        lease.recorded = self.record(self._commit_record(commit, version + accepted))

        def run() -> PiFacts | None:
            if failure is not None:
                raise failure
            lease.about_to_change()
            with self._undone_if_rule_raises(lease):
                return move()

        def move() -> PiFacts | None:
            lease.swap_snapshots(commit.header.base_version)
            buffers = lease.buffers
            if lease.shared_reply is not None and REPLY not in buffers:
                buffers = {**buffers, REPLY: lease.shared_reply}
            pi = None
            if accepted:
                pi = self.rule.apply(layout, self.central.theta, commit.gradient, buffers, rule_input)
                self.rule.scale(rule_input, pi)  # asked for once more in `finish`, where it is too late to raise
            else:
                self.rule.pull(self.central.theta, buffers)
            if lease.shared_reply is not None and REPLY in lease.buffers:  # the rule has an answer of its own, and keeps it
                np.copyto(lease.shared_reply, lease.buffers[REPLY])
            return pi

        return Step(commit, rule_input, accepted, run)

    @contextmanager
    def _undone_if_rule_raises(self, lease: Lease) -> Iterator[None]:
        """A user's rule may raise at any point, with its work half done: puts back θ and all that the rule keeps, and raises
        RuleFailed. A replay of the log comes to the same end, for the rule raises there too. Not so if memory is lacking: that
        ends the server, as any error in a rule of our own does. Those raise nothing, and nothing is copied for them."""
        if not is_users(self.rule):
            yield
            return
        arrays = [self.central.theta, *lease.buffers.values(), *self.shared.buffers.values()]
        if lease.shared_reply is not None:
            arrays.append(lease.shared_reply)
        copies = [array.copy() for array in arrays]
        named, numbers, spare_version = dict(lease.buffers), dict(self.shared.numbers), lease.spare_version
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            for array, copy in zip(arrays, copies, strict=True):
                np.copyto(array, copy)
            lease.buffers.update(named)
            self.shared.numbers.clear()
            self.shared.numbers.update(numbers)
            lease.spare_version = spare_version
            raise self._rule_failed(error) from error

    def _rule_failed(self, error: Exception) -> RuleFailed:
        return RuleFailed(f"rule {self.settings.rule} raised {where_raised(self.rule, error)}; the commit is left out")

    def failed(self, commit: Commit) -> None:
        """The rule raised at the commit's turn: its sequence is free again."""
        commit.lease.queued = None

    def _commit_record(self, commit: Commit, version: int) -> Record:
        header = commit.header
        fields = {
            "ticket": commit.ticket,
            "lease": header.lease_id,
            "sequence": header.sequence,
            "base_version": header.base_version,
            "version": version,
            "dtype": commit.arrived.dtype,
            "loss": header.loss,
            "samples": header.samples,
            "norm": commit.norm,
        }
        return Record(Kind.COMMITTED, fields, commit.arrived.pieces)

    def finish(self, step: Step, pi: PiFacts | None, now: float) -> Applied:
        """The arithmetic is done: makes the commit part of the run."""
        lease, header = step.commit.lease, step.commit.header
        self.central.version += step.accepted
        version = self.central.version
        lease.base_version = version - 1 if self.rule.replies_before and step.accepted else version
        lease.sequence, lease.queued, lease.restored = header.sequence, None, False
        lease.expires_at = now + self.leases.duration
        lease.last_applied = Applied(
            ticket=step.commit.ticket,
            worker=lease.worker,
            sequence=header.sequence,
            version=version,
            base_version=lease.base_version,
            staleness=step.rule_input.staleness,
            loss=header.loss,
            samples=header.samples,
            pi=pi,
            scale=self.rule.scale(step.rule_input, pi) if step.accepted else 0.0,
            discarded=not step.accepted,
        )
        self.outcomes[Outcome.APPLIED if step.accepted else Outcome.DISCARDED] += 1
        self.steps_done[lease.worker] = self.steps_done.pop(lease.worker, 0) + 1
        while len(self.steps_done) > MAX_COUNTED_NAMES:  # by the order of commits alone, so that a replay forgets the same
            del self.steps_done[next(iter(self.steps_done))]
        self.samples_committed += header.samples * step.accepted
        return lease.last_applied

    # -- shards

    @property
    def workers_awaited(self) -> int:
        """How many workers must be in the run before its first shard is handed out; 0 once it has begun."""
        begun = self._begun or self.central.version > 0 or len(self.leases.live) >= self._min_workers
        return 0 if begun else self._min_workers

    def lease_shard(self, lease_id: str, samples: int, now: float, holding: Collection[int] = ()) -> Shard | NoShard:
        """The next shard for a worker that still works on the shards `holding`; its others go back first.

        Raises:
            InvalidRequest: It holds too many, or its training set is not the run's; nothing changes then.
        """
        lease = self.leases.renew(lease_id, now)
        if self.workers_awaited:
            return NoShard(complete=False)
        kept = self.ledger.held_of(lease_id, holding)
        if len(kept) >= MAX_SHARDS:
            raise InvalidRequest(f"this worker holds {len(kept)} shards already: complete some before it asks for more")
        dealt = self.deal(lease, samples, kept)
        self.record(Record(Kind.DEALT, {"lease": lease_id, "samples": samples, "holding": sorted(kept)}))
        return dealt

    def deal(self, lease: Lease, samples: int, holding: Collection[int]) -> Shard | NoShard:
        """The same, whoever else has joined. Raises InvalidRequest, and changes nothing then."""
        self.ledger.require_samples(samples)
        self.ledger.release(lease.lease_id, but=holding)
        return self.ledger.lease(lease.lease_id, lease.worker, samples)

    def complete_shard(self, lease_id: str, shard_id: int, now: float) -> bool:
        self.leases.renew(lease_id, now)
        accepted = self.ledger.complete(lease_id, shard_id)
        if accepted:
            self.record(Record(Kind.COMPLETED, {"lease": lease_id, "shard": shard_id}))
        return accepted

    # -- readers without a lease

    def plan_copy(self) -> Callable[[], Copy]:
        """Between two commits: what makes, or finds, the copy of θ at this version. Raises Overloaded for want of room."""
        if not self.central.has_copy:
            self.memory.require_room_for_copy()
        return self.central.copy


def _require_windows_fit(settings: Hyperparameters) -> None:
    """Raises ValueError where a worker would have to hold more shards than it may before its first commit."""
    shards = settings.local_steps // -(-settings.shard_size // settings.batch_size) + 2
    if shards > MAX_SHARDS:
        raise ValueError(
            f"{settings.local_steps} local steps are batches of {shards} shards, and a worker may hold {MAX_SHARDS}: "
            "raise --shard-size, or take fewer local steps"
        )
