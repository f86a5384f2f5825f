"""The core: everything that the server decides. It uses no gRPC, clock or files: `now` is passed in, facts are returned.

One thread calls it. The exception is `Step.run`, the arithmetic of one commit: the apply loop runs it in another thread between
`begin` and `finish`. Meanwhile nothing else touches θ or the worker's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
from gem_api.errors import GemError, InvalidRequest, LeaseEnded
from gem_api.hyperparameters import FIXED, Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.ranges import WHOLE, Range
from gem_api.region import Region
from gem_api.schedule import Eta

from gem_server.core import arithmetic, checks, joining
from gem_server.core.central_variable import CentralVariable, Copy
from gem_server.core.commits import Arrived, Commit, Step, as_floats
from gem_server.core.gathering import Gathering
from gem_server.core.leases import SPARE, Lease, LeaseTable
from gem_server.core.memory_budget import Memory
from gem_server.core.norm_bound import NormHistory
from gem_server.core.optimizer_choice import Choice
from gem_server.core.quarantine import Quarantine
from gem_server.core.records import Kind, Record, Recorder, discard_record
from gem_server.core.shards import MAX_SHARDS, NoShard, Shard, ShardLedger, require_windows_fit
from gem_server.core.shares import Shares
from gem_server.core.uploads import Upload
from gem_server.core.values import (
    Admission,
    Applied,
    Awaited,
    Ended,
    EndReason,
    Header,
    LeaderRegistration,
    Outcome,
    PullDecision,
    Registration,
)
from gem_server.rules import PiStatistics, RuleInput, Shared, UpdateRule, rule_of
from gem_server.rules.base import require_by_element

MAX_COUNTED_NAMES = 10_000  # workers whose steps are counted; without a limit, new names would fill the memory
MIN_COMMITS = 8  # from which the samples of the run's other commits are told


class Core:
    """The central variable, the leases, the shard ledger and the rule, as one state machine.

    Args:
        run_id: The run's id.
        settings: The run's hyper-parameters. Raises ValueError if they contradict each other.
        lease_seconds: How long a lease lives without a sign of life from its worker.
        memory_limit: Bytes that θ, its copies and the workers may take together; 0 for no limit.
        min_workers, start_quiet_seconds: What a new run waits for before its first shard is dealt: see `Gathering`.
        new_id: Makes lease ids that cannot be guessed.
        norms: The bound on gradients' norms; by default there is none.
        quarantine: Keeps out workers whose gradients are rejected; by default no worker is kept out.
        logged: Whether the server writes a log. If so, gradients must not change until they are written.
        stated: The hyper-parameters that the user gave: the first worker's optimizer must agree with them.
        part: Which part of θ this server holds.

    Attributes:
        run_id: The run's id. A server that does not lead takes it from the leader, until θ has a value.
        shares: Which share of a whole batch each worker's gradients should have, and what a commit counts.
        rounds: Rounds so far: each commit counts its weight divided by n, the commits of a round.
        steps_done: Applied commits by worker name, for the 10,000 names that committed last, the latest at the end. A worker
            that returns after it was dropped from here starts at 0, and so may make `--steps` commits once more.
        record: Takes a record of each event that changes the run, in order; see `record_to`.
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
        start_quiet_seconds: float = 0.0,
        norms: NormHistory | None = None,
        quarantine: Quarantine | None = None,
        logged: bool = False,
        stated: Collection[str] = (),
        part: Range = WHOLE,
    ) -> None:
        self.run_id = run_id
        self.part = part
        self.started_with = settings
        self.stated = stated
        self.gathering = Gathering(min_workers, start_quiet_seconds)
        settings.require_valid()
        self.leases = LeaseTable(lease_seconds, new_id)
        self.central = CentralVariable()
        self._use(settings, rule_of(settings))
        if not part.whole:
            require_by_element(self.rule)
        require_windows_fit(settings)
        self.shared = Shared(numbers=dict(self.rule.numbers))
        self.memory = Memory(memory_limit, self.rule, self.central, self.leases)
        self.record: Recorder = discard_record
        self.logged = logged
        self.ledger = ShardLedger(settings)
        self.norms, self.quarantine = norms or NormHistory(), quarantine or Quarantine()
        self.next_ticket = 1
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.steps_done: dict[str, int] = {}
        self.samples_committed = 0
        self.rounds = 0.0
        self.ended_leases: list[Ended] = []

    def record_to(self, recorder: Recorder) -> None:
        """Sends the records of all further events to `recorder`. Earlier events are in the checkpoint that the log follows."""
        self.record = recorder

    def settle(self, settings: Hyperparameters, rule: UpdateRule) -> None:
        """Begins a new run, without workers yet, with these settings."""
        if settings != self.settings:
            rule.use_threads(self.rule.threads)
            self._use(settings, rule)
            self.memory.rule = rule
            self.shared = Shared(numbers=dict(rule.numbers))

    def change(self, settings: Hyperparameters) -> None:
        """Changes the hyper-parameters. Raises ValueError if a `FIXED` one differs, or if they contradict each other."""
        if changed := [name for name in FIXED if getattr(settings, name) != getattr(self.settings, name)]:
            raise ValueError(f"a run can't change its {', '.join(changed)}")
        settings.require_valid()
        self._use(settings, rule_of(settings))
        self.memory.rule = self.rule
        self.ledger.change(settings)

    def _use(self, settings: Hyperparameters, rule: UpdateRule) -> None:
        self.settings, self.rule = settings, rule
        self.central.keep_average(settings.average)
        self.shares = Shares(self.leases.timetable, settings.smallest_share)

    # -- joining and leaving

    def register(
        self, worker: str, layout: Layout, now: float, overlap: bool = False, owner: str = "", choice: Choice = None,
        leader: LeaderRegistration | None = None,
    ) -> Registration:  # fmt: skip
        """Opens a lease. On a server that does not lead, this may be repeated. See `joining.register`."""
        return joining.register(self, worker, layout, now, overlap, owner, choice, leader)

    def reopen(self, lease_id: str, worker: str, overlap: bool, owner: str, now: float) -> None:
        """Opens a lease that a log records. Raises Overloaded if there is no memory for it."""
        assert self.central.layout is not None
        _, buffers = self.memory.take(self.central.layout, overlap)
        self.leases.open(lease_id, worker, buffers, now, owner)

    def mark_restarted(self, shard_ids: int | None) -> None:
        """Call this after the server has restarted with this run.

        Without a log, the restart may have lost commits that workers know to be applied. `admit` ends each lease whose next
        commit shows that.

        Args:
            shard_ids: A random number if the restart may have lost dealt shards, otherwise None. New shards then get ids from
                the range of that number, so that no id is used twice.
        """
        for lease in self.leases.live.values():
            lease.restored = True
        self.leases.pace.restart()
        self.leases.timetable.restart()
        self.gathering.resumed()
        if shard_ids is not None:
            self.ledger.number_anew(shard_ids)

    def renew(self, lease_id: str, now: float, waiting: bool = False) -> Lease:
        """Renews a lease. `waiting`: the worker waits for something that it needs to train, so it does not stand still."""
        if waiting:
            return self.leases.renew_training(lease_id, now)
        return self.leases.renew(lease_id, now)

    def leave(self, lease_id: str, reason: EndReason = EndReason.LEFT) -> Ended:
        return self.end_lease(self.leases.get(lease_id), reason)

    def expire(self, now: float, busy: Callable[[str], bool] = lambda lease_id: False) -> list[Ended]:
        """Ends the leases whose time is up, and those of workers that no longer train: see `LeaseTable.stalled`."""
        ended = [self.end_lease(lease, EndReason.EXPIRED) for lease in self.leases.expired(now, self.central.initializer)]
        # A server that does not lead hands out no shards: to it, a worker that waits for one looks the same.
        stalled = self.leases.stalled(now, busy) if self.part.leads else []
        return ended + [self.end_lease(lease, EndReason.STALLED) for lease in stalled]

    def end_unfit(self, unfit: Callable[[Lease], bool]) -> list[Ended]:
        """Ends the leases whose workers cannot continue after a restart."""
        return [self.end_lease(lease, EndReason.ROLLED_BACK) for lease in filter(unfit, list(self.leases.live.values()))]

    def pop_ended_leases(self) -> list[Ended]:
        """The leases that `admit` and `register` have ended since the last call, except for those that were replaced."""
        taken, self.ended_leases = self.ended_leases, []
        return taken

    def end_lease(self, lease: Lease, reason: EndReason) -> Ended:
        self.leases.end(lease, reason)
        self.record(Record(Kind.ENDED, {"lease": lease.lease_id, "reason": reason}))
        if self.central.initializer == lease.lease_id:
            self.central.initializer = None
        if not self.leases.live and not self.central.initialized:
            self.central.forget_layout()
            self.settle(self.started_with, rule_of(self.started_with))
        self.elect_initializer()
        return Ended(lease.lease_id, lease.worker, reason, self.ledger.release(lease.lease_id))

    # -- θ's first value

    def elect_initializer(self) -> None:
        """Chooses the oldest live worker to give θ its first value, unless one is chosen already."""
        if not self.central.initialized and self.central.initializer is None:
            self.central.initializer = next(iter(self.leases.live), None)

    def require_initializer(self, lease_id: str, now: float) -> Lease:
        """Returns the lease of the worker that may give θ its first value. Raises InvalidRequest if that is another worker."""
        lease = self.leases.renew_training(lease_id, now)
        if self.central.initialized or self.central.initializer != lease_id:
            raise InvalidRequest("this worker was not asked to initialise the model: pull the parameters instead")
        return lease

    def initialized(self) -> None:
        """Call this once θ has its first value. Raises Overloaded if there is no memory for what a run keeps with it."""
        self.shared.buffers = self.memory.take_shared()
        self.memory.begin_average()
        self.central.start()

    # -- reading θ

    def pull_decision(self, lease_id: str, now: float) -> PullDecision:
        self.leases.renew_training(lease_id, now)
        if self.central.initialized:
            self.shares.begin(lease_id, now)
            return PullDecision.READY
        return PullDecision.INITIALIZE if self.central.initializer == lease_id else PullDecision.WAIT

    def plan_pull(self, lease: Lease) -> Callable[[], int]:
        """Plans a pull; call it between two commits. The returned function copies the current θ to the worker's reply buffer,
        and returns its version."""
        if lease.lease_id in self.leases.live:
            self.record(Record(Kind.PULLED, {"lease": lease.lease_id, "version": self.central.version}))
        return partial(self.pull, lease)

    def pull(self, lease: Lease) -> int:
        """Copies θ to the worker's reply buffer and returns its version. Raises RuleFailed if a user's rule raises."""
        lease.about_to_change()
        pull = self.rule.pull if lease.sequence else self.rule.first_pull
        with self._undone_if_rule_raises(lease):
            pull(self.central.theta, lease.buffers)
        lease.base_version = lease.spare_version = self.central.version
        lease.progress = lease.reply_progress = lease.spare_progress = self.central.progress
        if lease.overlaps:
            np.copyto(lease.buffers[SPARE], lease.buffers["snapshot"])
        return lease.base_version

    def reply(self, lease: Lease) -> Vector:
        """The θ that the worker computes its next gradient on: float32, shape (P,)."""
        return lease.buffers[self.rule.reply_buffer]

    def resend_reply(self, lease: Lease) -> None:
        """Writes the reply to the worker's shared memory again, for a repeated commit. Call it between two commits."""
        if lease.shared_reply is not None:
            np.copyto(lease.shared_reply, self.reply(lease))

    # -- memory shared with a worker on this machine

    def adopt_region(self, lease: Lease, region: Region) -> None:
        """Has a lease's gradients and replies lie in a region that its worker shares.

        The worker may write anything there at any time. The rule's buffers therefore stay in the server's own memory. A
        gradient is either copied before it is used, or checked again when the rule reads it.
        """
        if lease.region is not region:
            lease.region, lease.copied = region, self.logged or self.norms.bounded or not self.rule.reads_once
            self.leases.recount(lease)

    # -- a commit: admit, (receive), ticket, begin, (run), finish

    def admit(self, header: Header, now: float) -> tuple[Admission, Lease]:
        """Decides by a commit's header whether its gradient should be received.

        Raises:
            LeaseEnded: The lease is unknown or has ended; or the server has restarted without commits that the worker knows
                to be applied, and the lease ends now.
            LayoutMismatch: The fingerprint is not the run's.
            SequenceGap: The sequence is neither the next, nor the queued, nor the last one; a part of θ takes any later one.
            InvalidRequest: The base version does not exist yet, the rule does not take this kind of update, or a part of θ is
                older than the worker knows it.
            NotInitialized: θ has no value yet.
        """
        lease = self.leases.renew_training(header.lease_id, now)
        self.central.require_initialized()
        checks.require_layout(self.central.layout, header.fingerprint)
        if (repeat := checks.repeated(lease, header.sequence)) is not None:
            self.outcomes[Outcome.REPEATED] += 1
            self.leases.timetable.resumed(lease.lease_id, self.shares.weight(header.share))
            return repeat, lease
        gaps = not self.part.whole
        if gaps:
            checks.require_not_older(lease, header)
        if checks.knows_lost_commits(lease, header, gaps):
            self.ended_leases.append(self.end_lease(lease, EndReason.ROLLED_BACK))
            raise LeaseEnded("the server restarted without this worker's last commit: register again", EndReason.ROLLED_BACK)
        checks.require_due(lease, header.sequence, gaps)
        checks.require_applicable(header, self.rule.kind, self.settings, self.central.version)
        return Admission.FRESH, lease

    def ticket(
        self, lease: Lease, header: Header, now: float, upload: Upload, arrived: Arrived | None = None,
        norm: float | None = None,
    ) -> Commit:  # fmt: skip
        """Gives a commit its place in the FIFO queue.

        Args:
            lease, header: What `admit` returned FRESH for.
            now: Seconds of the caller's clock.
            upload: The gradient, which is complete. The commit does not release it.
            arrived: The gradient as it was sent, if that was not float32.
            norm: The gradient's norm, if norms have a bound.

        Raises:
            LeaseEnded: The lease has ended since.
            NormOutOfBounds: The norm exceeds the bound.
        """
        self.leases.renew_training(lease.lease_id, now, committed=True)
        if norm is not None:
            self.norms.judge(norm)
        self.quarantine.accepted(lease.worker)
        self.leases.timetable.arrived(lease.lease_id, now, weight := self.shares.weight(header.share))
        if lease.overlaps:  # it has its last reply, and computes on
            self.shares.begin(lease.lease_id, now)
        lease.queued = header.sequence
        commit = Commit(self.next_ticket, lease, header, upload, arrived or as_floats(upload.gradient), norm, weight)
        self.next_ticket += 1
        return commit

    def rejected(self, lease_id: str, error: GemError) -> Ended | None:
        """Counts a rejected commit. If that puts its worker into quarantine, ends the lease and returns that end."""
        lease = self.leases.live.get(lease_id)
        if lease is None or not self.quarantine.rejected(lease.worker, error):
            return None
        return self.end_lease(lease, EndReason.QUARANTINED)

    def begin(self, commit: Commit) -> Step:
        """Prepares the arithmetic of the next commit. If a user's rule raises, `Step.run` changes nothing and raises
        RuleFailed.

        Raises:
            LeaseEnded: The lease has ended while the commit waited.
        """
        lease, version = self.leases.get(commit.header.lease_id), self.central.version
        staleness = version - commit.header.base_version
        eta, workers = Eta.at(self.settings, self.central.progress), len(self.leases.live)
        change, then = eta.change_since(lease.eta), lease.progress_at(commit.header.base_version)
        passed = float(staleness) if then is None else self.central.progress - then
        held = then is not None and not lease.overlaps  # may have been: the replies of workers that overlap never are
        meanwhile = self.central.progress - lease.reply_progress if held else passed
        rule_input = RuleInput(
            staleness, version, lease.sequence, eta.factor, workers, self.shared, change, commit.weight, passed, meanwhile
        )
        accepted, failure = arithmetic.accepts(self.rule, self.settings.rule, rule_input)
        if commit.norm is not None:  # now and not with its ticket: a checkpoint has what the log does not tell
            self.norms.accepted(commit.norm)
        lease.recorded = self.record(commit.record(version + accepted))
        run = partial(self._run, commit, rule_input, accepted) if failure is None else partial(arithmetic.fail, failure)
        return Step(commit, rule_input, accepted, run)

    def _run(self, commit: Commit, rule_input: RuleInput, accepted: bool) -> PiStatistics | None:
        commit.lease.about_to_change()
        with self._undone_if_rule_raises(commit.lease):
            return arithmetic.move(self.rule, self.central, commit, rule_input, accepted)

    def _undone_if_rule_raises(self, lease: Lease) -> AbstractContextManager[None]:
        return arithmetic.undone_if_rule_raises(self.rule, self.settings.rule, self.central.theta, self.shared, lease)

    def failed(self, commit: Commit) -> None:
        """Call this if the rule raised: the commit leaves the queue, and its sequence may be sent again."""
        commit.lease.queued = None

    def finish(self, step: Step, pi: PiStatistics | None, now: float) -> Applied:
        """Call this once the commit's arithmetic is done: makes the commit part of the run."""
        commit, rule_input, accepted, _ = step
        lease, header, weight, central = commit.lease, commit.header, commit.weight, self.central
        if accepted:
            central.version += 1
            central.progress += weight
            self.rounds += weight / rule_input.count
            lease.eta = Eta(self.settings.learning_rate, rule_input.factor)
        version = central.version
        lease.base_version = version - 1 if accepted and self.rule.replies_before else version
        lease.progress = lease.reply_progress = central.progress
        lease.sequence, lease.queued, lease.restored = header.sequence, None, False
        lease.expires_at = now + self.leases.duration
        lease.last_applied = arithmetic.applied_commit(self.rule, step, pi, version)
        self.outcomes[Outcome.APPLIED if accepted else Outcome.DISCARDED] += 1
        self._count_step(lease.worker)
        self.samples_committed += header.samples * accepted
        if not lease.overlaps:
            self.shares.begin(lease.lease_id, now)
        return lease.last_applied

    def _count_step(self, worker: str) -> None:
        """Drops names by the order of commits alone, so that a replay drops the same ones."""
        self.steps_done[worker] = self.steps_done.pop(worker, 0) + 1
        while len(self.steps_done) > MAX_COUNTED_NAMES:
            del self.steps_done[next(iter(self.steps_done))]

    # -- shards

    def awaited(self, now: float) -> Awaited | None:
        """The workers that the run waits for before its first shard is dealt; None once it has begun."""
        self.gathering.begun |= self.central.version > 0 or self.ledger.samples > 0
        return self.gathering.look(len(self.leases.live), now)

    def lease_shard(self, lease_id: str, samples: int, now: float, holding: Collection[int] = ()) -> Shard | NoShard:
        """Deals the next shard to a worker. It keeps the shards that `holding` names; its other shards go back to the ledger.

        Raises:
            InvalidRequest: It holds too many shards, or its training set is not the run's. Nothing changes then.
        """
        lease = self.leases.renew_training(lease_id, now)
        if self.awaited(now):
            return NoShard(complete=False)
        kept = self.ledger.held_of(lease_id, holding)
        if len(kept) >= MAX_SHARDS:
            raise InvalidRequest(f"this worker holds {len(kept)} shards already: complete some before asking for more")
        dealt = self.deal(lease, samples, kept)
        self.record(Record(Kind.DEALT, {"lease": lease_id, "samples": samples, "holding": sorted(kept)}))
        return dealt

    def deal(self, lease: Lease, samples: int, holding: Collection[int]) -> Shard | NoShard:
        """As `lease_shard`, but does not wait for the run to begin. If it raises InvalidRequest, nothing has changed."""
        self.ledger.require_samples(samples)
        self.ledger.release(lease.lease_id, but=holding)
        return self.ledger.lease(lease.lease_id, lease.worker, samples)

    @property
    def complete(self) -> bool:
        """Whether the workers in the run have nothing left to train on. Any thread may ask."""
        return self.ledger.complete_for({lease.worker for lease in tuple(self.leases.live.values())})

    @property
    def expected_commits(self) -> float | None:
        """The whole commits that the run makes in all, by the samples of those so far; None if that is not known yet, or if the
        data leave it open: an endless run, `--steps`, or `replicate`, where it depends on the workers."""
        settings, applied, discarded = self.settings, self.central.version, self.outcomes[Outcome.DISCARDED]
        fixed = settings.epochs and not settings.steps and settings.shards == "partition"
        if not fixed or not self.ledger.samples or not self.samples_committed or applied < MIN_COMMITS:
            return None
        left_over = applied / (applied + discarded)  # by a rule that discards stale commits
        return settings.epochs * self.ledger.samples * self.central.progress / self.samples_committed * left_over

    def complete_shard(self, lease_id: str, shard_id: int, now: float) -> bool:
        """Marks a shard as completed. Returns False if this lease does not hold it."""
        self.leases.renew_training(lease_id, now)
        accepted = self.ledger.complete(lease_id, shard_id)
        if accepted:
            self.record(Record(Kind.COMPLETED, {"lease": lease_id, "shard": shard_id}))
        return accepted

    # -- readers without a lease

    def plan_copy(self, average: bool = False) -> Callable[[], Copy]:
        """Plans a copy of θ, or of its average; call it between two commits. The returned function makes the copy, or finds one
        of this version. Raises Overloaded if there is no room for a copy, and InvalidRequest if the run keeps no average."""
        if average:
            self.central.require_average()
        if not self.central.has_copy(average):
            self.memory.require_room_for_copy()
        return partial(self.central.copy, average)
