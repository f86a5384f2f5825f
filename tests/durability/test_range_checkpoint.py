"""Checkpoints and backups of several real servers, each with a range of the model."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.errors import CheckpointFailed, GemError, InvalidRequest, ServerUnavailable
from gem_api.layout import Vector
from gem_api.ranges import Range
from gem_api.v1 import admin_pb2, training_pb2
from gem_client import Admin
from gem_server.durability import checkpoint, reshard
from gem_server.durability.range_files import BadRanges
from kit.raw_client import Worker, chunks
from kit.raw_ranges import SUMS, TWO, Ranges, commit_all, serving_ranges
from kit.server import DEADLINE, config, serving, wait_until
from safetensors.numpy import load_file

NAMES = ["ann", "bob", "cy"]


@pytest.fixture
def ranges(tmp_path: Path) -> Iterator[Ranges]:
    with serving_ranges(tmp_path) as running:
        yield running


class Committing:
    """Workers that commit to all ranges all the time. Element k of each range counts worker k's commits. A commit reaches one
    range a little later than the other, as on a network."""

    def __init__(self, ranges: Ranges) -> None:
        self.crew = [ranges.started(NAMES[0]), *(ranges.joined(name) for name in NAMES[1:])]
        self.commits = [0] * len(NAMES)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(NAMES))]

    def __enter__(self) -> Committing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE)

    def _run(self, number: int) -> None:
        late = random.Random(number)
        while not self._stop.is_set():
            parts = [threading.Thread(target=_count, args=(worker, number)) for worker in self.crew[number]]
            for part in sorted(parts, key=lambda part: late.random()):
                part.start()
                self._stop.wait(late.uniform(0, 0.02))  # parts of a commit arrive at different times
            for part in parts:
                part.join()
            self.commits[number] += 1

    def go_on(self, commits: int = 2) -> None:
        """Waits until each worker has made some more commits."""
        before = list(self.commits)
        wait_until(lambda: all(now >= then + commits for now, then in zip(self.commits, before, strict=True)), "commits")


def _count(worker: Worker, number: int) -> None:
    gradient = np.zeros(worker.size, np.float32)
    gradient[number] = -1
    worker.took(worker.whole(worker.header(), *chunks(gradient)).answer(worker.size))


def counted(path: str) -> list[int]:
    """What a checkpoint's θ has counted, which must agree with the sequences of its leases."""
    tensors = load_file(Path(path) / "model.safetensors")
    counts = [int(count) for count in next(iter(tensors.values())).reshape(-1)[: len(NAMES)]]
    state = json.loads((Path(path) / "state.json").read_text())
    sequences = {lease["worker"]: lease["sequence"] for lease in state["leases"]}
    assert counts == [sequences[name] for name in NAMES]
    assert state["version"] == sum(counts)
    return counts


def test_each_range_has_what_the_leads_checkpoint_counts_while_workers_go_on(ranges: Ranges) -> None:
    """But for one commit of each worker that is under way as the leader is copied."""
    seen = []
    with Admin(ranges.lives[0].address) as admin, Committing(ranges) as committing:
        for _ in range(3):
            committing.go_on()
            leader, other = (counted(written.path) for written in admin.checkpoint_all())
            assert all(theirs >= ours - 1 for ours, theirs in zip(leader, other, strict=True))
            seen.append(leader)
        committing.go_on()
    assert all(later > earlier for earlier, later in pairwise(seen))
    commits = dict(zip(NAMES, committing.commits, strict=True))
    assert [ranges.sequences(0), ranges.sequences(1)] == [commits, commits]


# -- failures


def test_a_range_out_of_reach_fails_the_checkpoint(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.lives[1].stop()
    with Admin(ranges.lives[0].address, 5) as admin, pytest.raises(ServerUnavailable, match="range 1 at 127"):
        admin.checkpoint()
    ann[0].commit()


def test_a_range_that_cannot_write_fails_the_checkpoint_and_can_be_tried_again(ranges: Ranges, tmp_path: Path) -> None:
    ann = ranges.started("ann")
    commit_all(ann)
    folder, away = tmp_path / "range-1", tmp_path / "away"
    folder.rename(away)
    folder.write_text("a file is in the way")
    with Admin(ranges.lives[0].address) as admin:
        with pytest.raises(CheckpointFailed, match=r"range 1 at .*could not write"):
            admin.checkpoint()
        folder.unlink()
        away.rename(folder)
        commit_all(ann)
        assert admin.checkpoint().version == 2


def test_a_range_that_is_older_than_the_leader_is_said(ranges: Ranges) -> None:
    """As if the folder of range 1 had been replaced by an older copy."""
    commit_all(ranges.started("ann"))
    leader = ranges.lives[0]
    leader.on_loop(lambda: setattr(leader.core.central, "version", leader.core.central.version + 100))
    with Admin(leader.address) as admin, pytest.raises(CheckpointFailed, match=r"range 1 is at version 1, range 0 at 101"):
        admin.checkpoint()


def test_wrong_peers_are_said(tmp_path: Path) -> None:
    with serving_ranges(tmp_path / "three", 3) as three:
        peers = tuple(live.address for live in reversed(three.lives[1:]))
        changed = config(SUMS, checkpoint_dir=tmp_path / "lead", range=Range(0, 3), peers=peers, durability="log")
        wrong = pytest.raises(InvalidRequest, match=r"range 1 at .*it holds range 2/3.*check --peers")
        with serving(changed) as leader, Admin(leader.address) as admin, wrong:
            admin.checkpoint()


# -- the end, and another number of servers


def test_draining_the_leader_drains_all_ranges(ranges: Ranges, tmp_path: Path) -> None:
    commit_all(ranges.started("ann"))
    with Admin(ranges.lives[0].address) as admin:
        assert admin.drain() == 0
    for index, live in enumerate(ranges.lives):
        live.stop()
        assert checkpoint.list_checkpoints(tmp_path / f"range-{index}")[0].name == "checkpoint-000000000001-0001"


def test_draining_goes_on_without_a_range_out_of_reach_and_says_so(ranges: Ranges) -> None:
    ranges.lives[1].stop()
    with Admin(ranges.lives[0].address, 5) as admin, pytest.raises(GemError, match="range 1 at 127"):
        admin.drain()
    ranges.lives[0].stop()
    assert not ranges.lives[0]._thread.is_alive()


def thetas(ranges: Ranges) -> Vector:
    parts: list[Any] = [live.on_loop(live.core.central.theta.copy) for live in ranges.lives]
    return np.concatenate(parts)


def test_servers_resume_from_the_folders_that_reshard_writes(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    with serving_ranges(source) as ranges:
        ann = ranges.started("ann", value=2.0)
        commit_all(ann, 1.0)
        commit_all(ann, -3.0)
        before = thetas(ranges)
        with pytest.raises(BadRanges, match="a server is using"):
            reshard.load(source, 2)
        shutil.copytree(source, tmp_path / "crashed")
        with pytest.raises(BadRanges, match="the log goes on after"):
            reshard.load(tmp_path / "crashed", 2)
    reshard.write(reshard.load(source, 2), out)
    for restarts in range(2):  # the log goes on from the first start
        with serving_ranges(out, resume=True) as ranges:
            assert thetas(ranges).tobytes() == before.tobytes()
            assert {live.core.central.version for live in ranges.lives} == {2 + restarts}
            commit_all(ranges.joined("ann", TWO))
            before = thetas(ranges)


def backup_in_mid_training(ranges: Ranges, folder: Path) -> list[Worker]:
    """Copies the leader's checkpoint after ann's first commit, and that of range 1 two commits of ann and one of bob later. ann
    holds a shard in the leader's, and has completed it since; bob has no lease there. Returns ann."""
    ann = ranges.started("ann")
    commit_all(ann)
    shard = ranges.wires[0].call("LeaseShard", training_pb2.LeaseShardRequest(lease_id=ann[0].lease_id, sample_count=20))
    leader = ranges.wires[0].call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
    commit_all(ann)
    commit_all(ann)
    done = training_pb2.CompleteShardRequest(lease_id=ann[0].lease_id, shard_id=shard.shard.shard_id)
    assert ranges.wires[0].call("CompleteShard", done).accepted
    commit_all(ranges.joined("bob"))
    other = ranges.wires[1].call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
    for index, written in enumerate((leader, other)):
        shutil.copytree(written.path, folder / f"range-{index}" / Path(written.path).name)
    return ann


@pytest.mark.parametrize("recut", [False, True])
def test_a_run_goes_on_from_a_backup_in_mid_training(recut: bool, tmp_path: Path) -> None:
    """With the leader's counts. A worker of before gets an error, as the leader has not all of its commits."""
    folder = tmp_path / "backup"
    with serving_ranges(tmp_path / "servers") as ranges:
        ann = backup_in_mid_training(ranges, folder)
    if recut:
        reshard.write(reshard.load(folder, 2), tmp_path / "recut")
        folder = tmp_path / "recut"
    versions = [1, 1 if recut else 4]
    for restarts in range(2):  # the log goes on from the first start
        with serving_ranges(folder, resume=True) as ranges:
            assert [live.core.central.version for live in ranges.lives] == [version + 2 * restarts for version in versions]
            theta = thetas(ranges)
            assert (theta[0], theta[-1]) == (-1 - 2 * restarts, -4 - 2 * restarts)
            before = Worker(ranges.wires[0], ann[0].registration).whole(ann[0].header(), *ann[0].body()).refusal()
            assert before.error == ("LEASE_ENDED" if recut or restarts else "INVALID_REQUEST")
            ann_again, bob = ranges.joined("ann"), ranges.joined("bob")
            asked = training_pb2.LeaseShardRequest(lease_id=bob[0].lease_id, sample_count=20)
            assert ranges.wires[0].call("LeaseShard", asked).shard.ByteSize()
            status = ranges.lives[0].on_loop(ranges.lives[0].server.wiring.view.read)
            assert status.shards.completed == 0, "the shard that ann held is dealt again"
            commit_all(ann_again)
            commit_all(bob)


def test_a_server_says_how_to_start_with_another_range(tmp_path: Path) -> None:
    with serving_ranges(tmp_path) as ranges:
        ranges.started("ann")
    with (
        pytest.raises(Exception, match=r"holds range 1/2 .*--range 0/1: .*gem-ctl reshard"),
        serving(config(SUMS, checkpoint_dir=tmp_path / "range-1", resume=True, durability="log")),
    ):
        pass
