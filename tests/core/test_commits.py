"""Commits of a core: each applied once, repeats answered, wrong ones rejected without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gem_api.errors import InvalidRequest, LayoutMismatch
from gem_api.hyperparameters import Hyperparameters
from gem_server.core.checks import MAX_SAMPLES
from gem_server.core.values import Admission, Outcome
from kit.core import ONES, bits, by_rule, commit, header, make_core, start, state


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


def test_a_strangers_layout_is_refused_and_nothing_changes() -> None:
    core = make_core()
    (ann,) = start(core)
    before = state(core)
    with pytest.raises(LayoutMismatch, match="fingerprint"):
        core.admit(replace(header(core, ann, 1), fingerprint=b"\0" * 32), 0.0)
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


def test_steps_and_samples_are_counted_once_each() -> None:
    core = make_core()
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES, samples=10)
    commit(core, bob, 1, ONES, samples=5)
    core.admit(header(core, bob, 1), 0.0)
    core.leave(bob)
    assert core.steps_done == {"ann": 1, "bob": 1}
    assert core.samples_committed == 15


def test_the_samples_of_a_discarded_commit_are_not_counted() -> None:
    core = make_core(Hyperparameters(rule="ringmaster", rule_options="threshold=1"))
    ann, bob = start(core, ["ann", "bob"])
    commit(core, ann, 1, ONES, samples=10)
    assert commit(core, bob, 1, ONES, samples=5).discarded
    assert core.samples_committed == 10
