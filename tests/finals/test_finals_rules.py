"""What the study of whole runs computes: its rule, its rivals and its schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_server.core.releases import Releases
from gem_server.rules import RuleInput, Shared, rule_of
from kit.core import SMALL, header, make_core, send, start

from benchmarks.finals import together
from benchmarks.finals.apart import Rule, cosine
from benchmarks.finals.clock import SIZES, Clock, Policy
from benchmarks.finals.held_out import LENGTH, Tagger, Trees
from benchmarks.finals.runs import Run, limit_of
from benchmarks.versus.models import NOBODY
from benchmarks.versus.profiles import KINDS

P = SMALL.size


def gradient(theta: Vector, worker: int, step: int, size: int) -> Vector:
    noise = np.random.default_rng((worker, step)).normal(0, 1, P).astype(np.float32)
    return np.asarray(theta - 1 + noise / np.float32(np.sqrt(size)), np.float32)


def never(time: float, theta: Vector) -> bool:
    return False


@pytest.mark.parametrize("profile", ["equal", "mixed", "exponential"])
def test_without_shares_and_waits_it_is_the_servers_rule(profile: str) -> None:
    """What rounding changes is amplified where π is at its bound."""
    events = Clock(KINDS[profile], 8, 0, Policy(), 12).events()
    start = np.linspace(-1, 1, P).astype(np.float32)
    found = Rule(0.003, schedule="constant").train(start, events, 8, gradient, never)
    given: dict[str, Any] = {"rule": "gem", "optimizer": "adamw", "learning_rate": 0.003, "rule_options": "growth=0"}
    rule, theta = rule_of(Hyperparameters(**given).with_defaults(given)), start.copy()
    shared = Shared({name: np.zeros(P, np.float32) for name in rule.shared}, dict(rule.numbers))
    buffers = [{name: np.zeros(P, np.float32) for name in rule.buffers} for _ in range(8)]
    for each in buffers:
        rule.first_pull(theta, each)
    version, bases = 0, [0] * 8
    for event in events:
        mine = buffers[event.worker]
        if event.size:
            g = gradient(mine[rule.reply_buffer], event.worker, event.step, event.size)
            staleness = version - bases[event.worker]
            rule.apply(Layout.of({"theta": (P,)}), theta, g, mine, RuleInput(staleness, version, workers=8, shared=shared))
            version += 1
        bases[event.worker] = version
    np.testing.assert_allclose(found, theta, atol=1e-4)


class Planned:
    """Holds the replies that a clock's events hold, in place of the server's own decision."""

    wait = 0.0

    def __init__(self) -> None:
        self.holds = False

    def hold(self, lease_id: str, now: float) -> bool:
        return self.holds

    def end(self, lease_id: str) -> bool:
        return True


@pytest.mark.parametrize("profile", ["equal", "mixed", "straggler"])
def test_with_shares_and_waits_it_is_the_servers_core(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times are exponential a few replies differ: if the last commit's worker was alone meanwhile, its snapshot is θ, and
    so is what is released then (14 of 405 with 8 workers in 200 rounds)."""
    events = Clock(KINDS[profile], 8, 0, Policy(0.0625, 0.15, 200), 12).events()
    start_at = np.linspace(-1, 1, SMALL.size).astype(np.float32)
    found = Rule(0.003, growth=10, schedule="constant").train(start_at, events, 8, gradient, never)
    given: dict[str, Any] = {"rule": "gem", "optimizer": "adamw", "learning_rate": 0.003}
    core = make_core(Hyperparameters(**given).with_defaults(given), lease_seconds=600.0)
    leases, releases, planned = start(core, [f"w{number}" for number in range(8)], theta=start_at), Releases(core), Planned()
    monkeypatch.setattr(releases, "_rendezvous", planned)
    held = []
    for number, event in enumerate(events):
        lease = core.leases.get(leases[event.worker])
        if event.size:
            after = next((each.held for each in events[number + 1 :] if each.worker == event.worker), True)
            planned.holds = after
            head = header(core, lease.lease_id, lease.sequence + 1, samples=event.size, share=event.size / SIZES)
            g = gradient(core.reply(lease), event.worker, event.step, event.size)
            step = core.begin(send(core, head, g, event.time))
            core.finish(step, step.run(), event.time)
            assert releases.applied(step, event.time) == after
        elif event.held:
            held.append(lease.lease_id)
            if not (number + 1 < len(events) and events[number + 1].held and events[number + 1].time == event.time):
                releases.plan(held)()
                held = []
    np.testing.assert_allclose(found, core.central.theta, atol=2e-4)


def test_the_schedule_rises_and_falls_to_zero() -> None:
    factors = [cosine(done, 1000) for done in range(1001)]
    assert factors[0] < 0.06
    assert max(factors) == pytest.approx(1, abs=0.01)
    assert factors[1000] == 0
    assert factors.index(max(factors)) in (19, 20)


def test_a_round_takes_as_long_as_those_that_are_waited_for() -> None:
    mixed, exponential = KINDS["mixed"], KINDS["exponential"]
    all_, fast = (len(together.rounds(together.Team(kind), mixed, 8, 0, 300)) for kind in ("all", "fast"))
    assert all_ == pytest.approx(300 / 3.2, rel=0.05)
    assert fast == pytest.approx(300 / 1.06, rel=0.03)
    few = together.rounds(together.Team("backup", first=6), exponential, 8, 0, 300)
    assert len(few) > 1.8 * len(together.rounds(together.Team(), exponential, 8, 0, 300))
    assert {len(one.parts) for one in few} == {6}
    sizes = {size for one in together.rounds(together.Team("proportion"), mixed, 8, 0, 30) for _, _, size in one.parts}
    assert sizes == {5, SIZES}


@pytest.mark.parametrize("profile", [name for name in KINDS if name != "spot"])
def test_the_time_of_a_run_is_that_in_which_workers_that_do_not_wait_make_the_gradients(profile: str) -> None:
    limit = limit_of(Run("transformer", profile, 8, 0, 200, "ours", ""))
    commits = [event for event in Clock(KINDS[profile], 8, 0, Policy(), limit).events() if event.size]
    assert len(commits) == pytest.approx(1600, rel=0.04)


@pytest.mark.long
def test_the_tasks_that_nothing_was_tuned_on_are_well_formed() -> None:
    tagger, trees = Tagger(), Trees()
    codes, kinds = tagger.batch(0, 1, 2)
    assert codes.shape == kinds.shape == (16, LENGTH)
    assert int(kinds.max()) < len(Tagger.KINDS)
    graphs, hidden = trees.batch(0, 1, 2)
    for (kinds_, parents), target in zip(graphs, hidden, strict=True):
        assert ((kinds_ == 1) == (target != NOBODY)).all()
        assert (target != NOBODY).any()
        assert all(parent < place or place == 0 for place, parent in enumerate(parents.tolist()) if kinds_[place] > 0)
