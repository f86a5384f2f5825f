"""What held replies become when they are released, and that a log and a checkpoint know it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_server.core.commits import Step
from gem_server.core.records import Kind
from gem_server.core.releases import WAIT_ROUNDS, Releases
from gem_server.core.state_machine import Core
from gem_server.core.timetable import _Steps
from gem_server.durability import checkpoint
from gem_server.durability.capture import state_buffers
from gem_server.durability.scratch import Scratch
from gem_server.rules.specification import released
from kit.core import SMALL, bits, header, make_core, recorded, replay_all, send, start, state

HELD = Hyperparameters(rule="gem", optimizer="adamw", learning_rate=0.01, reply_wait=0.15)
STEP = 10.0


class Run:
    """A core, whose workers' commits are all expected at any time, and its log."""

    def __init__(self, settings: Hyperparameters = HELD, workers: int = 3) -> None:
        self.core = make_core(settings, lease_seconds=600.0)
        self.leases = start(self.core, [f"w{number}" for number in range(workers)], theta=0.5)
        self.releases = Releases(self.core)
        self.records = recorded(self.core)
        self.random = np.random.default_rng(1)
        self.now = 100.0

    def commit(self, index: int) -> bool:
        """A worker's commit. Returns whether its reply is held."""
        for lease_id in self.leases:
            if lease_id not in self.releases._aheads:
                self.core.leases.timetable._steps[lease_id] = _Steps(self.now - STEP + 0.1, pace=STEP, first=False)
        lease_id = self.leases[index]
        head = header(self.core, lease_id, self.core.leases.get(lease_id).sequence + 1)
        gradient = self.random.normal(size=SMALL.size).astype(np.float32)
        step: Step = self.core.begin(send(self.core, head, gradient, self.now))
        self.core.finish(step, step.run(), self.now)
        return self.releases.applied(step, self.now)

    def round(self) -> None:
        """All commit; the last one releases the others."""
        held = [self.commit(index) for index in range(len(self.leases))]
        assert held == [True] * (len(held) - 1) + [False]
        due = self.releases.due(self.now)
        assert sorted(due) == sorted(self.leases[:-1])
        self.releases.plan(due)()

    def snapshot(self, index: int) -> Any:
        return self.core.leases.get(self.leases[index]).buffers["snapshot"]


def replayed(run: Run) -> Core:
    """What a log brings back of a run."""
    core = make_core(run.core.settings, lease_seconds=600.0)
    start(core, [f"w{number}" for number in range(len(run.leases))], theta=0.5)
    replay_all(core, run.records)
    return core


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lion", "worker"])
def test_a_released_reply_lies_ahead_of_theta_by_its_own_round_to_the_bit(optimizer: str) -> None:
    reach = {"sgd": 0.0, "worker": 0.5}.get(optimizer, 1.5)
    run = Run(Hyperparameters(rule="gem", optimizer=optimizer, learning_rate=0.01, reply_wait=0.15))
    run.round()
    for index in (1, 0, 2):
        run.commit(index)
    source = run.snapshot(2).copy()
    due = run.releases.due(run.now)
    assert sorted(due) == run.leases[:2]
    run.releases.plan(due)()
    ratios = dict(run.records[-1].fields["leases"])
    # In the second round: those that committed before it while it computed, since the release; of worker 2, whose reply was
    # not held, two have.
    for index, others in ((0, 1), (1, 0)):
        ratio = ratios[run.leases[index]]
        assert ratio == pytest.approx(min(reach, 1.0) * others / (reach * 2) if reach else 0.0)
        assert bits(run.snapshot(index)) == bits(released(run.core.central.theta, source, ratio))
        assert run.core.leases.get(run.leases[index]).base_version == run.core.central.version


@pytest.mark.parametrize(
    "settings", [HELD, Hyperparameters(rule="gem", reply_wait=0.15), Hyperparameters(rule="dana", reply_wait=0.1)]
)
def test_a_log_brings_releases_back_to_the_bit(settings: Hyperparameters) -> None:
    run = Run(settings)
    for _ in range(4):
        run.round()
        run.now += STEP
    run.commit(0)
    assert run.releases.release(run.leases[0], run.now)
    run.releases.plan([run.leases[0]])()  # from its own snapshot
    assert sum(record.kind is Kind.RELEASED for record in run.records) == 5
    assert state(replayed(run)) == state(run.core)


def test_the_reply_of_the_last_commit_is_made_last_as_the_others_are_made_from_it() -> None:
    run = Run()
    run.round()
    for index in (2, 0):
        assert run.commit(index)
    source, theta = run.snapshot(0).copy(), run.core.central.theta.copy()
    run.releases.plan([run.leases[0], run.leases[2]])()
    order = [lease for lease, _ in run.records[-1].fields["leases"]]
    ratios = dict(run.records[-1].fields["leases"])
    assert order == [run.leases[2], run.leases[0]]
    for index in (0, 2):
        assert bits(run.snapshot(index)) == bits(released(theta, source, ratios[run.leases[index]]))


def test_without_the_worker_of_the_last_commit_a_reply_is_theta() -> None:
    run = Run()
    run.round()
    run.commit(0)
    run.commit(1)
    run.core.leave(run.leases[1])
    run.releases.plan([run.leases[0], run.leases[1]])()
    assert run.records[-1].fields["source"] == ""
    assert bits(run.snapshot(0)) == bits(run.core.central.theta)
    assert state(replayed(run)) == state(run.core)


def test_a_checkpoint_that_is_being_written_has_the_snapshot_from_before_the_release() -> None:
    run = Run()
    run.round()
    run.commit(0)
    lease = run.core.leases.get(run.leases[0])
    before = {name: bits(buffer) for name, buffer in state_buffers(run.core, lease).items()}
    scratch = Scratch(SMALL.size)
    captured = checkpoint.capture(run.core, scratch=scratch)
    captured.copy_theta()
    run.core.central.theta += 1
    run.releases.plan([run.leases[0]])()
    assert bits(lease.buffers["snapshot"]) != before["snapshot"]
    for name in captured.shapes:
        tensor = captured.tensor(name)
        if name.startswith(f"{lease.lease_id}/"):
            assert bits(tensor) == before[name.rpartition("/")[2]]
    captured.close()


def test_a_reply_that_was_forgotten_is_not_made() -> None:
    run = Run()
    run.round()
    run.commit(0)
    run.commit(1)
    run.releases.forget(run.leases[0])
    run.releases.forget(run.leases[1])
    before = state(run.core)
    run.releases.plan([run.leases[0]])()
    assert state(run.core) == before
    assert run.releases.next_look(run.now) is None


def test_replies_wait_in_the_first_rounds_alone() -> None:
    run = Run()
    run.core.rounds = WAIT_ROUNDS - 2.0
    assert run.commit(0)
    run.core.rounds = float(WAIT_ROUNDS)
    assert not run.commit(1)


def test_a_worker_that_overlaps_never_waits() -> None:
    run = Run()
    lease = run.core.leases.get(run.leases[0])
    lease.buffers["spare_snapshot"] = lease.buffers["snapshot"].copy()
    assert not run.commit(0)
