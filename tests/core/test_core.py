"""The core: which worker initialises, what is applied once, what is rejected, and how much memory everything takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from core_helpers import SMALL, apply, bits, commit, header, make_core, send, start
from gem_api.errors import (
    GemError,
    InvalidRequest,
    LayoutMismatch,
    LeaseEnded,
    NotInitialized,
    Overloaded,
    SequenceGap,
)
from gem_api.hyperparameters import RULES, SNAPSHOTS, Hyperparameters
from gem_api.layout import Layout
from gem_server.core.checks import MAX_SAMPLES
from gem_server.core.facts import Admission, Applied, EndReason, Outcome, PullDecision
from gem_server.core.memory_budget import MAX_COPIES
from gem_server.core.shards import NoShard
from gem_server.core.state_machine import Core
from hypothesis import given, settings
from hypothesis import strategies as st

ONES = np.ones(SMALL.size, np.float32)
SETTINGS = [
    *(Hyperparameters(rule=rule) for rule in RULES),
    *(Hyperparameters(snapshot=snapshot) for snapshot in SNAPSHOTS[1:]),
]
by_rule = pytest.mark.parametrize("hyperparameters", SETTINGS, ids=lambda h: f"{h.rule}-{h.snapshot}")


def state(core: Core) -> tuple[Any, ...]:
    """Everything that a refused commit must leave alone."""
    leases = [
        (lease.lease_id, lease.sequence, lease.queued, lease.base_version, [bits(b) for b in lease.buffers.values()])
        for lease in core.leases.live.values()
    ]
    return bits(core.central.theta), core.central.version, core.next_ticket, core.steps_done, core.samples_committed, leases


def as_restored(core: Core) -> None:
    """What a restored core's leases look like."""
    for lease in core.leases.live.values():
        lease.restored = True


# -- the first value


def initializers(core: Core) -> list[str]:
    """The leases that are asked for the first value now."""
    asked = PullDecision.INITIALIZE
    return [lease_id for lease_id in core.leases.live if core.pull_decision(lease_id, 0.0) is asked]


def test_the_first_worker_alone_is_asked_for_the_first_value() -> None:
    core = make_core()
    registrations = [core.register(worker, SMALL, 0.0) for worker in ("ann", "bob", "cy")]
    assert [registration.must_initialize for registration in registrations] == [True, False, False]
    assert initializers(core) == ["lease-1"]
    assert core.pull_decision("lease-2", 0.0) is PullDecision.WAIT


def test_when_the_initialiser_dies_half_way_the_oldest_one_left_is_asked() -> None:
    core = make_core(lease_seconds=10)
    for worker in ("ann", "bob", "cy"):
        core.register(worker, SMALL, 0.0)
    core.require_initializer("lease-1", 0.0)
    core.central.theta[:3] = 7  # half of it had arrived
    core.renew("lease-2", 5.0)
    core.renew("lease-3", 5.0)
    core.expire(10.0)
    assert initializers(core) == ["lease-2"]
    with pytest.raises(LeaseEnded):
        core.require_initializer("lease-1", 10.0)
    with pytest.raises(InvalidRequest, match="not asked"):
        core.require_initializer("lease-3", 10.0)
    assert not core.central.initialized


@pytest.mark.parametrize("end", ["leave", "expire", "replace"])
def test_there_is_always_exactly_one_initialiser_while_there_are_workers(end: str) -> None:
    core = make_core(lease_seconds=10)
    for worker in ("ann", "bob"):
        core.register(worker, SMALL, 0.0)
    if end == "leave":
        core.leave("lease-1")
    elif end == "expire":
        core.renew("lease-2", 9.0)
        core.expire(10.0)
    else:
        core.register("ann", SMALL, 0.0)
    assert initializers(core) == ["lease-2"]


def test_once_initialised_nobody_is_asked_again() -> None:
    core = make_core()
    start(core, ["ann", "bob"])
    core.leave("lease-1")
    assert initializers(core) == []
    assert core.pull_decision("lease-2", 0.0) is PullDecision.READY
    assert not core.register("cy", SMALL, 0.0).must_initialize
    with pytest.raises(InvalidRequest, match="pull the parameters instead"):
        core.require_initializer("lease-2", 0.0)


def test_when_all_leave_before_the_first_value_the_next_worker_may_bring_another_model() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    core.leave("lease-1")
    assert core.register("bob", Layout.of({"other": (4,)}), 0.0).must_initialize
    assert core.central.size == 4


def test_a_lone_worker_may_come_back_with_another_model_before_the_first_value() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    assert core.register("ann", Layout.of({"other": (4,)}), 0.0).must_initialize
    assert core.central.size == 4
    with pytest.raises(LayoutMismatch):  # but not past another worker
        core.register("bob", SMALL, 0.0)
    core.register("bob", Layout.of({"other": (4,)}), 0.0)
    with pytest.raises(LayoutMismatch):
        core.register("ann", SMALL, 0.0)


def test_when_all_leave_after_the_first_value_theta_stays() -> None:
    core = make_core()
    (lease,) = start(core, theta=3.0)
    core.leave(lease)
    core.register("bob", SMALL, 0.0)
    core.pull(core.leases.get("lease-2"))
    assert (core.reply(core.leases.get("lease-2")) == 3).all()
    with pytest.raises(LayoutMismatch):
        core.register("cy", Layout.of({"other": (4,)}), 0.0)


def test_a_lone_worker_that_restarts_before_the_first_value_is_asked_again() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    registration = core.register("ann", SMALL, 0.0)
    assert registration.must_initialize
    assert registration.ended is not None
    assert registration.ended.reason is EndReason.REPLACED
    assert initializers(core) == ["lease-2"]


def test_nothing_is_committed_before_the_first_value() -> None:
    core = make_core()
    core.register("ann", SMALL, 0.0)
    with pytest.raises(NotInitialized):
        core.admit(header(core, "lease-1", 1), 0.0)


# -- exactly once


@by_rule
def test_a_repeat_gets_the_first_answer_and_is_not_applied_again(hyperparameters: Hyperparameters) -> None:
    core = make_core(hyperparameters)
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES)
    first = commit(core, ann, 2, ONES, loss=0.5)
    answer = bits(core.reply(core.leases.get(ann)))
    commit(core, bob, 1, ONES)  # others go on meanwhile
    before = state(core)
    for _ in range(2):
        admission, lease = core.admit(header(core, ann, 2, first.base_version), 1.0)
        assert admission is Admission.REPEATED
        assert lease.last_applied is first
        assert bits(core.reply(lease)) == answer
    assert state(core) == before
    assert core.outcomes == {Outcome.APPLIED: 3, Outcome.REPEATED: 2, Outcome.REJECTED: 0, Outcome.DISCARDED: 0}


def test_a_repeat_of_a_commit_that_waits_for_its_turn_takes_no_second_ticket() -> None:
    core = make_core()
    (ann,) = start(core)
    ticketed = send(core, header(core, ann, 1), ONES)
    admission, _ = core.admit(header(core, ann, 1), 0.0)
    assert admission is Admission.QUEUED
    assert core.next_ticket == ticketed.ticket + 1
    assert apply(core, ticketed).version == 1


@by_rule
def test_gaps_and_old_sequences_are_refused_and_nothing_changes(hyperparameters: Hyperparameters) -> None:
    core = make_core(hyperparameters)
    (ann,) = start(core)
    for number in (1, 2, 3):
        commit(core, ann, number, ONES)
    before = state(core)
    for sequence in (0, 1, 2, 5, 2**63):
        with pytest.raises(SequenceGap, match=f"commit {sequence} of this lease arrived; expected was 4"):
            core.admit(header(core, ann, sequence), 0.0)
        assert state(core) == before
    assert commit(core, ann, 4, ONES).version == 4


def test_sequence_zero_is_no_repeat_of_a_lease_that_has_committed_nothing() -> None:
    core = make_core()
    (ann,) = start(core)
    with pytest.raises(SequenceGap, match="expected was 1"):
        core.admit(header(core, ann, 0), 0.0)


def test_the_next_commit_is_refused_while_one_waits_for_its_turn() -> None:
    core = make_core()
    (ann,) = start(core)
    send(core, header(core, ann, 1), ONES)
    with pytest.raises(SequenceGap):
        core.admit(header(core, ann, 2), 0.0)


def test_sequences_count_per_lease() -> None:
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    assert commit(core, ann, 1, ONES).version == 1
    assert commit(core, bob, 1, ONES).version == 2
    assert commit(core, ann, 2, ONES).version == 3


def test_a_strangers_layout_is_refused_and_nothing_changes() -> None:
    core = make_core()
    (ann,) = start(core)
    before = state(core)
    with pytest.raises(LayoutMismatch, match="fingerprint"):
        core.admit(replace(header(core, ann, 1), fingerprint=b"\0" * 32), 0.0)
    assert state(core) == before


def test_a_base_version_from_the_future_is_refused_and_nothing_changes() -> None:
    core = make_core()
    (ann,) = start(core)
    before = state(core)
    with pytest.raises(InvalidRequest, match="base version 1 does not exist"):
        core.admit(header(core, ann, 1, base_version=1), 0.0)
    assert state(core) == before


def test_a_count_of_samples_that_can_only_be_a_mistake_is_refused() -> None:
    """The sum over the run is shown as a 64-bit number."""
    core = make_core()
    (ann,) = start(core)
    before = state(core)
    with pytest.raises(InvalidRequest, match="samples"):
        core.admit(header(core, ann, 1, samples=MAX_SAMPLES + 1), 0.0)
    assert state(core) == before
    commit(core, ann, 1, ONES, samples=MAX_SAMPLES)


def test_staleness_counts_the_commits_between_pull_and_own_commit() -> None:
    """τ of Eq. 2."""
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    assert [commit(core, ann, number, ONES).staleness for number in (1, 2, 3)] == [0, 0, 0]
    assert commit(core, bob, 1, ONES).staleness == 3
    core.pull(core.leases.get(ann))
    assert commit(core, ann, 4, ONES).staleness == 0


def test_a_header_with_an_older_base_counts_its_own_staleness() -> None:
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    for number in (1, 2):
        commit(core, ann, number, ONES)
    assert commit(core, bob, 1, ONES, base_version=1).staleness == 1


def test_tickets_are_applied_in_any_order_that_the_loop_chooses_and_versions_follow_it() -> None:
    """The core gives numbers; keeping to them is the apply loop's part."""
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    first, second = send(core, header(core, ann, 1), ONES), send(core, header(core, bob, 1), ONES)
    assert (first.ticket, second.ticket) == (1, 2)
    assert (apply(core, first).version, apply(core, second).version) == (1, 2)
    assert core.leases.get(bob).last_applied is not None
    assert core.leases.get(bob).last_applied.ticket == 2  # type: ignore[union-attr]


# -- leases


@pytest.mark.parametrize("end", ["leave", "replace"])
def test_a_commit_whose_lease_ends_while_it_waits_is_not_applied(end: str) -> None:
    core = make_core()
    (ann,) = start(core)
    ticketed = send(core, header(core, ann, 1), ONES)
    if end == "leave":
        core.leave(ann)
    else:
        core.register("ann", SMALL, 0.0)
    before = bits(core.central.theta)
    with pytest.raises(LeaseEnded):
        core.begin(ticketed)
    assert (bits(core.central.theta), core.central.version) == (before, 0)


def test_a_gradient_that_was_still_arriving_takes_no_ticket_once_its_lease_has_ended() -> None:
    core = make_core()
    (ann,) = start(core)
    head = header(core, ann, 1)
    _, lease = core.admit(head, 0.0)
    core.leave(ann)
    with pytest.raises(LeaseEnded):
        core.ticket(lease, head, 0.0)
    assert core.next_ticket == 1


def test_every_sign_of_life_renews_a_lease() -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    head = header(core, ann, 1)
    asks: list[Callable[[float], object]] = [
        lambda now: core.renew(ann, now),
        lambda now: core.pull_decision(ann, now),
        lambda now: core.lease_shard(ann, 10, now),
        lambda now: core.complete_shard(ann, 1, now),
        lambda now: core.admit(head, now),
        lambda now: core.ticket(core.leases.get(ann), head, now),
    ]
    for number, ask in enumerate(asks, 1):
        ask(9.0 * number)
        assert core.leases.get(ann).expires_at == 9.0 * number + 10


def test_a_commit_that_waited_long_for_its_turn_renews_its_lease_when_it_is_applied() -> None:
    core = make_core(lease_seconds=10)
    (ann,) = start(core)
    ticketed = send(core, header(core, ann, 1), ONES, now=0.0)
    assert core.expire(100.0) == []
    apply(core, ticketed, now=100.0)
    assert core.expire(109.0) == []
    assert [ended.reason for ended in core.expire(110.0)] == [EndReason.EXPIRED]


def test_an_ended_lease_frees_its_memory_and_gives_its_shards_back() -> None:
    core = make_core(lease_seconds=10)
    ann, bob = start(core, ["ann", "bob"])
    core.lease_shard(ann, 1000, 0.0)
    core.lease_shard(ann, 1000, 0.0, holding={1})
    core.renew(bob, 5.0)
    held = core.memory.held
    (ended,) = core.expire(10.0)
    assert (ended.lease_id, ended.worker, ended.reason, ended.shards_returned) == (ann, "ann", EndReason.EXPIRED, 2)
    assert core.memory.held == held - core.memory.most_for_worker
    assert core.ledger.held == {}
    with pytest.raises(LeaseEnded) as raised:
        core.admit(header(core, ann, 1), 10.0)
    assert raised.value.reason == "expired"


def test_a_worker_of_the_same_name_takes_over_and_the_old_lease_is_told_so() -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES)
    registration = core.register("ann", SMALL, 0.0)
    assert registration.lease_id == "lease-2"
    assert registration.steps_done == 1
    assert registration.ended is not None
    assert (registration.ended.lease_id, registration.ended.reason) == (ann, EndReason.REPLACED)
    with pytest.raises(LeaseEnded) as raised:
        core.admit(header(core, ann, 2), 0.0)
    assert raised.value.reason == "replaced"
    fresh = core.leases.get("lease-2")
    assert fresh.sequence == 0
    assert not fresh.buffers["moment"].any()


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "a\0", "\x1b[31m"])
def test_a_worker_name_that_could_spoil_a_log_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 128 printable"):
        make_core().register(name, SMALL, 0.0)


# -- after a restore


def test_a_restored_lease_is_answered_a_repeat_and_goes_on() -> None:
    core = make_core()
    (ann,) = start(core)
    first = commit(core, ann, 1, ONES)
    as_restored(core)
    assert core.admit(header(core, ann, 1), 0.0)[0] is Admission.REPEATED
    assert core.leases.get(ann).last_applied is first
    assert commit(core, ann, 2, ONES).version == 2
    with pytest.raises(SequenceGap):  # it has committed since: a gap is a bug again
        core.admit(header(core, ann, 9), 0.0)


@pytest.mark.parametrize("change", [{"sequence": 3}, {"base_version": 5}], ids=["later sequence", "later base"])
def test_a_restored_lease_that_lacks_acknowledged_commits_ends_rolled_back(change: dict[str, Any]) -> None:
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES)
    as_restored(core)
    theta = bits(core.central.theta)
    with pytest.raises(LeaseEnded, match="without this worker's last commit") as raised:
        core.admit(replace(header(core, ann, 2), **change), 0.0)
    assert raised.value.reason == "rolled_back"
    assert list(core.leases.live) == [bob]
    assert core.leases.ended == {EndReason.ROLLED_BACK: 1}
    assert bits(core.central.theta) == theta


def test_leases_that_ended_rolled_back_are_told_of_once() -> None:
    """Whoever asked the core to admit the commit must tell the others: their calls, the status, the log."""
    core = make_core()
    (ann,) = start(core)
    core.lease_shard(ann, 1000, 0.0)
    as_restored(core)
    with pytest.raises(LeaseEnded):
        core.admit(header(core, ann, 5), 0.0)
    (ended,) = core.take_rolled_back()
    assert (ended.lease_id, ended.reason, ended.shards_returned) == (ann, EndReason.ROLLED_BACK, 1)
    assert core.take_rolled_back() == []


def test_a_restored_lease_that_sends_an_old_sequence_is_a_bug_not_a_rollback() -> None:
    core = make_core()
    (ann,) = start(core)
    commit(core, ann, 1, ONES)
    commit(core, ann, 2, ONES)
    as_restored(core)
    with pytest.raises(SequenceGap):
        core.admit(header(core, ann, 1), 0.0)
    assert ann in core.leases.live


# -- memory

FLOATS = 4 * SMALL.size


@by_rule
def test_memory_is_theta_and_each_workers_buffers_and_upload(hyperparameters: Hyperparameters) -> None:
    core = make_core(hyperparameters)
    for number, worker in enumerate(("ann", "bob", "cy"), 1):
        core.register(worker, SMALL, 0.0)
        for_all = core.central.theta.nbytes * (1 + len(core.rule.shared) + core.rule.temporaries)
        held = for_all
        for lease in core.leases.live.values():
            held += lease.upload.nbytes + sum(buffer.nbytes for buffer in lease.buffers.values())
        assert core.memory.held == held
        assert held == for_all + number * core.memory.most_for_worker


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

    monkeypatch.setattr("gem_server.core.memory_budget.empty", no_memory)
    for worker in ("bob", "ann"):  # a new one, and one that would take its own place
        with pytest.raises(Overloaded, match="no memory"):
            core.register(worker, SMALL, 0.0)
    assert state(core) == before


# -- counting


def test_steps_and_samples_are_counted_once_each() -> None:
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES, samples=10)
    commit(core, bob, 1, ONES, samples=5)
    core.admit(header(core, bob, 1), 0.0)
    core.leave(bob)
    assert core.steps_done == {"ann": 1, "bob": 1}
    assert core.samples_committed == 15


# -- a dumb version


@dataclass
class DumbLease:
    worker: str
    expires: float
    starting: bool = True  # no sign of life yet
    sequence: int = 0
    last_applied: tuple[int, int, int] | None = None  # version, base version, staleness
    base: int = 0
    queued: tuple[int, int, float] | None = None  # sequence, base, gradient


@dataclass
class Dumb:
    """The core for one parameter under downpour, written without a thought for speed or memory."""

    theta: float = 0.0
    version: int = 0
    next_id: int = 1
    leases: dict[str, DumbLease] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    initialized: bool = False

    def register(self, worker: str, now: float) -> str:
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease.worker == worker]:
            del self.leases[lease_id]
        lease_id, self.next_id = f"lease-{self.next_id}", self.next_id + 1
        self.leases[lease_id] = DumbLease(worker, now + 10)
        return lease_id

    def initializer(self) -> str | None:
        """The oldest worker that has been there since the last one died: with one rule, always the oldest."""
        return next(iter(self.leases), None) if not self.initialized else None

    def expire(self, now: float) -> list[str]:
        def due(lease_id: str, lease: DumbLease) -> float:
            return lease.expires + (20 if lease.starting and lease_id != self.initializer() else 0)

        gone = [lease_id for lease_id, lease in self.leases.items() if due(lease_id, lease) <= now and not lease.queued]
        for lease_id in gone:
            del self.leases[lease_id]
        return gone

    def offer(self, lease_id: str, sequence: int, base: int, gradient: float, now: float) -> object:
        """What the core should say to a commit: an error's class, or the admission."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return LeaseEnded
        lease.expires, lease.starting = now + 10, False
        if not self.initialized:
            return NotInitialized
        if lease.queued and sequence == lease.queued[0]:
            return Admission.QUEUED
        if sequence == lease.sequence and lease.last_applied:
            return Admission.REPEATED
        if lease.queued or sequence != lease.sequence + 1:
            return SequenceGap
        if base > self.version:
            return InvalidRequest
        lease.queued = sequence, base, gradient
        self.queue.append(lease_id)
        return Admission.FRESH

    def turn(self, now: float) -> object:
        """The oldest ticket's turn: the facts of its commit, or LeaseEnded."""
        lease = self.leases.get(self.queue.pop(0))
        if lease is None:
            return LeaseEnded
        assert lease.queued is not None
        lease.sequence, base, gradient = lease.queued
        staleness = self.version - base
        self.theta -= 0.5 * gradient
        self.version += 1
        lease.last_applied, lease.base, lease.queued = (self.version, self.version, staleness), self.version, None
        lease.expires = now + 10
        self.steps[lease.worker] = self.steps.get(lease.worker, 0) + 1
        return lease.last_applied


ONE = Layout.of({"w": (1,)})
ACTIONS = st.one_of(
    st.tuples(st.just("register"), st.sampled_from(["ann", "bob", "cy"])),
    st.tuples(st.just("leave"), st.integers(1, 6)),
    st.tuples(st.just("renew"), st.integers(1, 6)),
    st.tuples(st.just("initialize"), st.integers(1, 3)),
    st.tuples(st.just("pull"), st.integers(1, 6)),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    *[st.tuples(st.just("commit"), st.tuples(st.integers(1, 6), st.integers(-2, 2), st.integers(-1, 1), st.integers(-8, 8)))]
    * 3,
    *[st.tuples(st.just("commit"), st.tuples(st.integers(1, 6), st.just(1), st.just(0), st.integers(-8, 8)))] * 3,
    *[st.tuples(st.just("turn"), st.none())] * 3,
)


class Both:
    """The core and its dumb version, side by side."""

    def __init__(self) -> None:
        self.core = make_core(Hyperparameters(rule="downpour", learning_rate=0.5), lease_seconds=10)
        self.dumb = Dumb()
        self.tickets: list[Any] = []
        self.now = 0.0

    def outcome(self, ask: Callable[[], object]) -> object:
        """What the core says: its result, or its error's class."""
        try:
            return ask()
        except GemError as error:
            return type(error)

    def register(self, worker: str) -> None:
        expected = self.dumb.register(worker, self.now)
        registration = self.core.register(worker, ONE, self.now)
        assert registration.lease_id == expected
        assert registration.steps_done == self.dumb.steps.get(worker, 0)

    def leave(self, number: int) -> None:
        known = self.dumb.leases.pop(f"lease-{number}", None)
        said = self.outcome(lambda: self.core.leave(f"lease-{number}").worker)
        assert said == (known.worker if known else LeaseEnded)

    def renew(self, number: int) -> None:
        known = self.dumb.leases.get(f"lease-{number}")
        if known:
            known.expires, known.starting = self.now + 10, False
        said = self.outcome(lambda: self.core.renew(f"lease-{number}", self.now).lease_id)
        assert said == (f"lease-{number}" if known else LeaseEnded)

    def initialize(self, number: int) -> None:
        lease_id = f"lease-{number}"
        known = self.dumb.leases.get(lease_id)
        said = self.outcome(lambda: self.core.require_initializer(lease_id, self.now).lease_id)
        if known is None:
            assert said is LeaseEnded
            return
        known.expires, known.starting = self.now + 10, False
        if self.dumb.initializer() != lease_id:
            assert said is InvalidRequest
            return
        assert said == lease_id
        self.core.central.theta[:] = 0
        self.core.initialized()
        self.dumb.initialized = True

    def pull(self, number: int) -> None:
        lease_id = f"lease-{number}"
        known = self.dumb.leases.get(lease_id)
        said = self.outcome(lambda: self.core.pull_decision(lease_id, self.now))
        if known is None:
            assert said is LeaseEnded
            return
        known.expires, known.starting = self.now + 10, False
        if not self.dumb.initialized:
            mine = self.dumb.initializer() == lease_id
            assert said is (PullDecision.INITIALIZE if mine else PullDecision.WAIT)
            return
        assert said is PullDecision.READY
        known.base = self.dumb.version
        assert self.core.pull(self.core.leases.get(lease_id)) == known.base

    def wait(self, seconds: int) -> None:
        self.now += seconds
        assert [ended.lease_id for ended in self.core.expire(self.now)] == self.dumb.expire(self.now)

    def commit(self, what: tuple[int, int, int, int]) -> None:
        number, ahead, newer, gradient = what
        lease_id = f"lease-{number}"
        known = self.dumb.leases.get(lease_id)
        sequence, base = (known.sequence + ahead, known.base + newer) if known else (1, 0)
        if sequence < 0 or base < 0 or self.core.central.layout is None:
            return
        expected = self.dumb.offer(lease_id, sequence, base, gradient, self.now)
        head = header(self.core, lease_id, sequence, base)
        said = self.outcome(lambda: self.core.admit(head, self.now)[0])
        assert said == expected
        lease = self.core.leases.live.get(lease_id)
        if said is Admission.FRESH:
            assert lease is not None
            lease.upload[:] = gradient
            self.tickets.append(self.core.ticket(lease, head, self.now))
        elif said is Admission.REPEATED:
            assert lease is not None
            assert known is not None
            assert self.facts(lease.last_applied) == known.last_applied

    def turn(self, _: None) -> None:
        if self.dumb.queue:
            expected = self.dumb.turn(self.now)
            ticketed = self.tickets.pop(0)
            said = self.outcome(lambda: self.facts(apply(self.core, ticketed, self.now)))
            assert said == expected

    @staticmethod
    def facts(applied: Applied | None) -> tuple[int, int, int] | None:
        return (applied.version, applied.base_version, applied.staleness) if applied else None

    def compare(self) -> None:
        assert self.core.central.version == self.dumb.version
        assert list(self.core.leases.live) == list(self.dumb.leases)
        assert self.core.central.initializer == self.dumb.initializer()
        assert self.core.steps_done == self.dumb.steps
        if self.dumb.initialized:
            assert self.core.central.theta.tolist() == [self.dumb.theta]  # gradients are small integers: exact
        for lease_id, lease in self.dumb.leases.items():
            assert self.core.leases.get(lease_id).sequence == lease.sequence
            assert self.core.leases.get(lease_id).expires_at == lease.expires


@settings(max_examples=300)
@given(st.lists(ACTIONS, max_size=40))
def test_it_agrees_with_a_dumb_version_whatever_happens(actions: list[tuple[str, Any]]) -> None:
    both = Both()
    for name, argument in [("register", "ann"), ("register", "bob"), ("initialize", 1), *actions]:
        getattr(both, name)(argument)
        both.compare()


@settings(max_examples=100)
@given(st.lists(ACTIONS, max_size=30))
def test_it_agrees_with_a_dumb_version_from_the_very_start(actions: list[tuple[str, Any]]) -> None:
    both = Both()
    for name, argument in actions:
        getattr(both, name)(argument)
        both.compare()


# -- waiting for workers


def awaiting(workers: int) -> tuple[Core, str, str]:
    """A core that waits for so many workers, and the leases of two that are there."""
    core = make_core(min_workers=workers)
    ann, bob = start(core, ["ann", "bob"])
    return core, ann, bob


def test_no_shard_is_handed_out_before_all_workers_that_are_waited_for_have_joined() -> None:
    core, ann, bob = awaiting(3)
    assert core.lease_shard(ann, 1000, 0.0) == NoShard(complete=False)
    assert core.workers_awaited == 3
    core.register("cid", SMALL, 0.0)
    assert core.workers_awaited == 0
    assert not isinstance(core.lease_shard(ann, 1000, 0.0), NoShard)
    assert not isinstance(core.lease_shard(bob, 1000, 0.0), NoShard)


def test_a_worker_that_comes_back_is_not_counted_twice() -> None:
    core, ann, _ = awaiting(3)
    core.register("bob", SMALL, 0.0)
    assert core.lease_shard(ann, 1000, 0.0) == NoShard(complete=False)


def test_once_all_were_there_nobody_is_waited_for_again() -> None:
    core, ann, bob = awaiting(2)
    core.leave(bob)
    assert not isinstance(core.lease_shard(ann, 1000, 0.0), NoShard)


def test_a_run_that_has_begun_waits_for_nobody() -> None:
    core, ann, _ = awaiting(3)
    commit(core, ann, 1, 1.0)
    assert not isinstance(core.lease_shard(ann, 1000, 0.0), NoShard)


def test_waiting_keeps_the_lease() -> None:
    core, ann, _ = awaiting(3)
    core.lease_shard(ann, 1000, 170.0)
    assert [ended.worker for ended in core.expire(190.0)] == ["bob"]
