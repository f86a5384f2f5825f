"""The core agrees with a dumb version of it, whatever workers do in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.dumb_core import Dumb
from gem_api.errors import GemError, InvalidRequest, LeaseEnded
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_server.core.values import Admission, Applied, PullDecision
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core import apply, header, make_core, uploaded

ONE = Layout.of({"w": (1,)})
LEASES = st.integers(1, 6)
ACTIONS = st.one_of(
    st.tuples(st.just("register"), st.sampled_from(["ann", "bob", "cy"])),
    st.tuples(st.just("leave"), LEASES),
    st.tuples(st.just("renew"), LEASES),
    st.tuples(st.just("initialize"), st.integers(1, 3)),
    st.tuples(st.just("pull"), LEASES),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    *[st.tuples(st.just("commit"), st.tuples(LEASES, st.integers(-2, 2), st.integers(-1, 1), st.integers(-8, 8)))] * 3,
    *[st.tuples(st.just("commit"), st.tuples(LEASES, st.just(1), st.sampled_from([0, 0, 1]), st.integers(-8, 8)))] * 3,
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
        assert registration.must_initialize == (self.dumb.initializer() == expected)

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
            self.tickets.append(self.core.ticket(lease, head, self.now, uploaded(self.core, gradient)))
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


START = [("register", "ann"), ("register", "bob"), ("initialize", 1)]


@settings(max_examples=300)
@given(st.sampled_from([START, START, []]), st.lists(ACTIONS, max_size=40))
def test_it_agrees_with_a_dumb_version_whatever_happens(before: list[tuple[str, Any]], actions: list[tuple[str, Any]]) -> None:
    both = Both()
    for name, argument in [*before, *actions]:
        getattr(both, name)(argument)
        both.compare()
