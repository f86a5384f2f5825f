"""Replies that wait for other workers' commits, on a real server. When commits are expected is set by hand, so that no test
depends on how fast this machine is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durability.checkpoint_helpers import crashed
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_server import apply_loop
from gem_server.core import releases
from gem_server.core.timetable import _Steps
from gem_server.durability import segment
from gem_server.rules import rule_of
from gem_server.rules.specification import released
from kit.raw_client import SMALL, Worker, wired
from kit.raw_ranges import serving_ranges
from kit.server import Live, config, serving, wait_until
from kit.ways import all_ways, running

P = SMALL.size
HELD = Hyperparameters(rule="gem", optimizer="adamw", learning_rate=0.01, reply_wait=0.15)


def expect(live: Live, workers: Sequence[Worker], seconds: float = 0.5, step: float = 60.0) -> None:
    """The commits of these workers are expected in so many seconds; their steps take `step`."""

    def know() -> None:
        for worker in workers:
            began = live.clock() + seconds - step
            live.core.leases.timetable._steps[worker.lease_id] = _Steps(began, pace=step, first=False)

    live.on_loop(know)


def held(live: Live) -> int:
    """Replies that wait."""
    return live.on_loop(lambda: len(live.server.wiring.apply_loop.held._held))


def held_commit(live: Live, worker: Worker, value: float = 1.0) -> Any:
    """Sends a commit whose reply is held, and returns its stream."""
    before = held(live)
    stream = worker.whole(worker.header(), *worker.body(value))
    wait_until(lambda: held(live) == before + 1, "the reply to be held")
    return stream


def snapshot(live: Live, worker: Worker) -> np.ndarray[Any, np.dtype[np.float32]]:
    return live.on_loop(lambda: live.core.leases.get(worker.lease_id).buffers["snapshot"].copy())


@all_ways
@pytest.mark.parametrize("inline", [apply_loop.INLINE_PARAMETERS, 0])
def test_workers_in_step_get_the_theta_after_the_last_commit_of_their_round(
    inline: int, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model is so small that it is done at once, or so large that it has its turn in the queue."""
    monkeypatch.setattr(apply_loop, "INLINE_PARAMETERS", inline)
    with running(way, HELD, checkpoint_dir=tmp_path, durability="log") as (live, wire):
        ann, ben = wire.crew(2)
        expect(live, [ann, ben])
        waiting = held_commit(live, ann)
        result, theta = ben.commit(2.0)
        late, late_theta = ann.took(waiting.answer(P))
        assert (late.version, late.base_version) == (1, 2)
        assert (result.version, result.base_version) == (2, 2)
        now, source = live.on_loop(lambda: live.core.central.theta.copy()), snapshot(live, ben)
        ratio = 0.0 / 1.5  # none has committed in ann's round before its own commit
        assert late_theta.tobytes() == released(now, source, ratio).tobytes() == snapshot(live, ann).tobytes()
        assert theta.tobytes() == source.tobytes()
        expect(live, [ann, ben])
        waiting = held_commit(live, ben)
        ann.commit()
        _, late_theta = ben.took(waiting.answer(P))
        now, source = live.on_loop(lambda: live.core.central.theta.copy()), snapshot(live, ann)
        assert late_theta.tobytes() == released(now, source, 0.0).tobytes()
        assert held(live) == 0


def test_a_worker_whose_partner_has_died_waits_at_most_the_bound_and_the_status_says_how_long() -> None:
    with serving(config(HELD)) as live, wired(live) as wire:
        ann, ben = wire.crew(2)
        expect(live, [ann], step=0.5)
        expect(live, [ben], 0.05, step=0.5)
        result, _ = ann.commit()
        assert result.base_version == 1
        status = {worker.name: worker.wait_seconds for worker in wire.status().workers}
        assert status["worker 0"] > 0.05
        assert status["worker 1"] == 0.0
        ann.commit()
        waited = live.metric("gem_reply_wait_seconds_sum")
        told = {worker.name: worker.waited_seconds for worker in wire.status().workers}
        assert told == {"worker 0": pytest.approx(waited), "worker 1": 0.0}


@all_ways
def test_a_repeat_of_a_commit_whose_reply_is_held_gets_its_reply_at_once(way: str) -> None:
    with running(way, HELD) as (live, wire):
        ann, ben, cas = wire.crew(3)
        expect(live, [ann, ben, cas])
        older, first = held_commit(live, ann), held_commit(live, ben)
        again, _ = ann.whole(ann.header(), *ann.body()).answer(P)
        assert (again.sequence, again.version, again.base_version) == (1, 1, 2)
        assert older.refusal().error == "SUPERSEDED"
        assert held(live) == 1
        cas.commit()
        assert ben.took(first.answer(P))[0].base_version == 3


@all_ways
def test_nobody_waits_for_a_worker_that_leaves(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "MAX_WAIT_SECONDS", math.inf)  # so that no reply is released because its time is up
    with running(way, HELD, lease_seconds=36000.0) as (live, wire):
        ann, ben = wire.crew(2)
        expect(live, [ann, ben], 600.0, step=36000.0)
        waiting = held_commit(live, ann)
        ben.leave()
        assert waiting.answer(P)[0].base_version == 1


@all_ways
def test_a_held_reply_ends_with_its_lease(way: str) -> None:
    with running(way, HELD) as (live, wire):
        ann, ben = wire.crew(2)
        expect(live, [ann, ben])
        waiting = held_commit(live, ann)
        wire.call("LeaveCluster", pb.LeaveClusterRequest(lease_id=ann.lease_id))
        refusal = waiting.refusal()
        assert (refusal.error, held(live)) == ("LEASE_ENDED", 0)
        assert ben.commit()[0].version == 2


@all_ways
def test_a_server_that_drains_makes_all_held_replies_at_once(way: str, tmp_path: Path) -> None:
    with running(way, HELD, checkpoint_dir=tmp_path, durability="log") as (live, wire):
        ann, ben = wire.crew(2)
        expect(live, [ann, ben])
        waiting = held_commit(live, ann)
        live._loop.call_soon_threadsafe(live.server.stop, "test")
        assert waiting.answer(P)[0].base_version == 1


def test_a_call_that_ends_leaves_nothing_behind() -> None:
    with serving(config(HELD)) as live, wired(live) as wire:
        ann, ben = wire.crew(2)
        expect(live, [ann, ben])
        held_commit(live, ann).cancel()
        wait_until(lambda: held(live) == 0, "the held reply to be made")
        assert live.core.leases.timetable._steps[ann.lease_id].began, "its next commit is expected, as any other's"
        assert live.on_loop(lambda: live.server.wiring.apply_loop.held.releases._aheads) == {}
        assert ben.commit()[0].version == 2
        assert ann.took(ann.whole(ann.header(), *ann.body()).answer(P))[0].version == 1


def test_a_pull_while_a_reply_is_held_gets_the_theta_of_now() -> None:
    with serving(config(HELD)) as live, wired(live) as wire:
        ann, ben = wire.crew(2)
        expect(live, [ann, ben])
        waiting = held_commit(live, ann)
        assert ann.pull()[0].version == 1
        assert waiting.refusal().error == "SUPERSEDED"
        assert held(live) == 0


def test_after_a_crash_while_a_reply_is_held_the_commit_counts_once_and_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the folder is what a kill -9 leaves: while the reply is held, and when it was made."""
    monkeypatch.setattr(segment, "_ALLOCATION", 4096)  # which is copied
    with serving(config(HELD, checkpoint_dir=tmp_path / "run", durability="log")) as live, wired(live) as wire:
        ann, ben = wire.crew(2)
        expect(live, [ann, ben])
        waiting = held_commit(live, ann)
        wait_until(lambda: on_the_disk(live), "the commit to be on the disk")
        left = [crashed(live, tmp_path / "held")]
        ben.commit()
        waiting.answer(P)
        left.append(crashed(live, tmp_path / "made"))
    for version, configuration in enumerate(left, 1):
        with serving(configuration) as live, wired(live) as wire:
            ann.wire = wire
            result, _ = ann.whole(ann.header(), *ann.body()).answer(P)
            assert (result.version, result.base_version) == (1, version)
            assert live.on_loop(lambda: live.core.central.version) == version


def on_the_disk(live: Live) -> bool:
    log = live.server.wiring.group_commit
    return log is not None and log.journal.durable == log.journal.appended


def test_commits_to_two_ranges_that_hold_replies_wait_at_most_the_bound_in_each(tmp_path: Path) -> None:
    """Ann waits for ben in one range, ben for ann in the other: neither sends more before both have answered."""
    with serving_ranges(tmp_path, settings=HELD) as ranges:
        ann, ben = ranges.started("ann"), ranges.joined("ben")
        for live, pair in zip(ranges.lives, zip(ann, ben, strict=True), strict=True):
            expect(live, pair, 0.05, step=2.0)
        waiting = [(held_commit(ranges.lives[index], worker), worker) for index, worker in ((0, ann[0]), (1, ben[1]))]
        assert [stream.answer(worker.size)[0].base_version for stream, worker in waiting] == [1, 1]
        assert [worker.commit()[0].version for worker in (ann[1], ben[0])] == [2, 2]


@pytest.mark.parametrize(
    ("rule", "options"), [("gem", {"snapshot": "paper"}), ("gem", {"snapshot": "reference"}), ("aeasgd", {})]
)
def test_a_rule_that_needs_its_reply_at_once_refuses_to_start(rule: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"reply_wait 0.1 lets replies wait, and rule {rule} "):
        rule_of(Hyperparameters(rule=rule, reply_wait=0.1, **options))
