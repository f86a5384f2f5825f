"""A checkpoint over all ranges, with real servers: the same commits in each, while workers go on."""

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
from gem_api.ranges import Range
from gem_api.v1 import admin_pb2
from gem_client import Admin
from gem_server.durability import checkpoint, reshard
from gem_server.durability.manifest import NAME, kept_checkpoints, read_manifest
from gem_server.durability.range_files import BadRanges
from kit.raw_client import Worker, chunks, wired
from kit.raw_ranges import SUMS, TWO, Ranges, commit_all, serving_ranges, with_cut
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


def test_all_ranges_have_the_same_commits_while_workers_go_on(ranges: Ranges, tmp_path: Path) -> None:
    seen = []
    with Admin(ranges.lives[0].address) as admin, Committing(ranges) as committing:
        for _ in range(6):
            committing.go_on()
            written = admin.checkpoint()
            manifest = read_manifest(Path(written.path).with_name(NAME))
            assert manifest.ranges[0].path == written.path
            counts = [counted(entry.path) for entry in manifest.ranges]
            assert counts[0] == counts[1]
            assert sorted(manifest.cut.values()) == sorted(counts[0])
            seen.append(counts[0])
        committing.go_on()
    assert all(later > earlier for earlier, later in pairwise(seen))
    commits = dict(zip(NAMES, committing.commits, strict=True))
    assert [ranges.sequences(0), ranges.sequences(1)] == [commits, commits]
    assert (tmp_path / "range-1" / NAME).exists()
    assert (tmp_path / "range-1" / NAME).read_bytes() == (tmp_path / "range-0" / NAME).read_bytes()


def test_a_manifests_checkpoint_is_kept_until_a_newer_manifest(tmp_path: Path) -> None:
    with serving_ranges(tmp_path, checkpoint_keep=1) as ranges, Admin(ranges.lives[0].address) as admin:
        ann = ranges.started("ann")
        commit_all(ann)
        named = [Path(entry.path) for entry in read_manifest(Path(admin.checkpoint().path).with_name(NAME)).ranges]
        for _ in range(3):
            commit_all(ann)
            for wire in ranges.wires:
                wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
            for path in named:
                assert len(checkpoint.list_checkpoints(path.parent)) == 2
                assert path in checkpoint.list_checkpoints(path.parent)
        commit_all(ann)
        admin.checkpoint()
        commit_all(ann)
        for wire in ranges.wires:
            wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
        assert not any(path.exists() for path in named)


def test_a_checkpoint_that_waits_for_its_manifest_is_kept(tmp_path: Path) -> None:
    with serving_ranges(tmp_path, checkpoint_keep=1) as ranges:
        ann = ranges.started("ann")
        commit_all(ann)
        ranges.begin(1)
        request = admin_pb2.CreateCheckpointRequest(cut=admin_pb2.Cut(sequences={ann[0].lease_id: 1}))
        written = ranges.wires[1].call("CreateCheckpoint", request)
        commit_all(ann)
        ranges.wires[1].call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
        entry = admin_pb2.RangeCheckpoint(address="a", path=written.path, version=written.version, sha256=written.sha256)
        ranges.wires[1].call("WriteManifest", admin_pb2.WriteManifestRequest(ranges=[entry, entry]))
        assert read_manifest(tmp_path / "range-1" / NAME).ranges[1].version == 1


class DyingClient:
    """Makes checkpoints over all ranges, and dies before it is done."""

    def __init__(self, ranges: Ranges, worker: list[Worker]) -> None:
        self._ranges, self._worker = ranges, worker

    def checkpoints(self) -> admin_pb2.WriteManifestRequest:
        """Writes the checkpoints, with one more commit. Returns what the manifest would say."""
        commit_all(self._worker)
        for index in range(2):
            self._ranges.begin(index)
        request = with_cut({self._worker[0].lease_id: self._worker[0].sequence - 1})
        written = [wire.call("CreateCheckpoint", request) for wire in self._ranges.wires]
        entries = [admin_pb2.RangeCheckpoint(address="a", path=w.path, version=w.version, sha256=w.sha256) for w in written]
        return admin_pb2.WriteManifestRequest(ranges=entries, cut=request.cut)


def leads_manifest_is_whole(folder: Path) -> int:
    """Returns the version of the lead's manifest, whose checkpoints must all be there."""
    entries = read_manifest(folder / "range-0" / NAME).ranges
    assert [entry.path for entry in entries if not Path(entry.path).exists()] == []
    return entries[0].version


def test_clients_that_die_while_they_write_manifests_leave_one_complete(tmp_path: Path) -> None:
    with serving_ranges(tmp_path, checkpoint_keep=1) as ranges, Admin(ranges.lives[0].address) as admin:
        ann = ranges.started("ann")
        commit_all(ann)
        admin.checkpoint()
        client = DyingClient(ranges, ann)
        for _ in range(2):
            ranges.wires[1].call("WriteManifest", client.checkpoints())  # and dies before the lead has it
            assert leads_manifest_is_whole(tmp_path) == 1
        client.checkpoints()
        for live in ranges.lives:
            live.server.parts.checkpointer._of_all_ranges = ""  # as after a restart
        for wire in ranges.wires:
            commit_all(ann)
            wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
        assert leads_manifest_is_whole(tmp_path) == 1
        manifest = client.checkpoints()
        ranges.wires[1].call("WriteManifest", manifest)
        ranges.wires[0].call("WriteManifest", manifest)  # and dies before it says so to the others
        client.checkpoints()
        assert leads_manifest_is_whole(tmp_path) > 1
        admin.checkpoint()
        commit_all(ann)
        for index, wire in enumerate(ranges.wires):
            wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
            assert len(checkpoint.list_checkpoints(tmp_path / f"range-{index}")) == 2, "older ones are kept no longer"


def test_a_late_word_of_an_older_manifest_releases_nothing(tmp_path: Path) -> None:
    with serving_ranges(tmp_path, checkpoint_keep=1) as ranges:
        client = DyingClient(ranges, ranges.started("ann"))
        first, second = client.checkpoints(), None
        ranges.wires[1].call("WriteManifest", first)
        second = client.checkpoints()
        ranges.wires[1].call("WriteManifest", second)
        first.complete = True
        ranges.wires[1].call("WriteManifest", first)
        kept = kept_checkpoints(tmp_path / "range-1", 1)
        assert kept == {Path(each.ranges[1].path).name for each in (first, second)}


def test_a_manifest_that_is_not_of_this_run_is_refused(ranges: Ranges) -> None:
    ranges.started("ann")
    written = ranges.wires[0].call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
    entry = admin_pb2.RangeCheckpoint(path=written.path, version=0, sha256=b"other")
    for entries, error in (([entry], "INVALID_REQUEST"), ([entry, entry], "CHECKPOINT_FAILED")):
        refusal = ranges.wires[0].refusal("WriteManifest", admin_pb2.WriteManifestRequest(ranges=entries))
        assert refusal.error == error
    entry.path = "elsewhere"
    refusal = ranges.wires[0].refusal("WriteManifest", admin_pb2.WriteManifestRequest(ranges=[entry, entry]))
    assert (refusal.error, "elsewhere" in refusal.details) == ("CHECKPOINT_FAILED", True)


# -- failures


def commits_go_on(workers: list[Worker]) -> None:
    """No range holds commits back."""
    for worker in workers:
        worker.commit()


def test_a_range_out_of_reach_fails_the_checkpoint_and_holds_nothing_back(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.lives[1].stop()
    with Admin(ranges.lives[0].address, 5) as admin, pytest.raises(ServerUnavailable, match="range 1 at 127"):
        admin.checkpoint()
    commits_go_on(ann[:1])


def test_a_range_that_cannot_begin_releases_the_others(ranges: Ranges) -> None:
    ann = ranges.started("ann")
    ranges.begin(1)
    with Admin(ranges.lives[0].address) as admin:
        with pytest.raises(CheckpointFailed, match=r"range 1 at .*in progress"):
            admin.checkpoint()
        commits_go_on(ann[:1])
        assert ranges.lives[0].on_loop(lambda: ranges.lives[0].server.parts.commit_path.hold.active) == 0
        ranges.wires[1].refusal("CreateCheckpoint", admin_pb2.CreateCheckpointRequest(cut=admin_pb2.Cut(sequences={"": 0})))
        commits_go_on(ann[1:])
        assert admin.checkpoint().version == 1  # it can be repeated


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
        commits_go_on(ann)
        assert not (tmp_path / "range-0" / NAME).exists()
        assert admin.checkpoint().version == 2


def test_a_range_of_another_age_gets_no_manifest(ranges: Ranges, tmp_path: Path) -> None:
    """As if the folder of range 1 had been replaced by an older copy: the manifest would bless it."""
    commit_all(ranges.started("ann"))
    lead = ranges.lives[0]
    lead.on_loop(lambda: setattr(lead.core.central, "version", lead.core.central.version + 100))
    with Admin(lead.address) as admin, pytest.raises(CheckpointFailed, match=r"range 1 is at version 1, range 0 at 101"):
        admin.checkpoint()
    assert not list(tmp_path.glob(f"*/{NAME}"))


def test_wrong_peers_are_said(tmp_path: Path) -> None:
    with serving_ranges(tmp_path / "three", 3) as three:
        peers = tuple(live.address for live in reversed(three.lives[1:]))
        changed = config(SUMS, checkpoint_dir=tmp_path / "lead", range=Range(0, 3), peers=peers, durability="log")
        wrong = pytest.raises(InvalidRequest, match=r"range 1 at .*it holds range 2/3.*check --peers")
        with serving(changed) as lead, Admin(lead.address) as admin, wrong:
            admin.checkpoint()


def test_one_server_writes_its_checkpoint_as_ever(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live, wired(live) as wire, Admin(live.address) as admin:
        wire.started("ann").commit()
        assert admin.checkpoint().version == 1
        assert not (tmp_path / NAME).exists()
        assert admin.drain() == 0
        live.stop()


# -- the end, and another number of servers


def test_draining_the_lead_drains_all_ranges(ranges: Ranges, tmp_path: Path) -> None:
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


def thetas(ranges: Ranges) -> bytes:
    parts: list[Any] = [live.on_loop(live.core.central.theta.copy) for live in ranges.lives]
    return np.concatenate(parts).tobytes()


@pytest.mark.parametrize("count", [1, 2])
def test_servers_resume_from_the_folders_that_reshard_writes(count: int, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    with serving_ranges(source) as ranges:
        ann = ranges.started("ann", value=2.0)
        commit_all(ann, 1.0)
        commit_all(ann, -3.0)
        before = thetas(ranges)
        with pytest.raises(BadRanges, match="a server is using"):
            reshard.load(source, count)
        shutil.copytree(source, tmp_path / "crashed")
        with pytest.raises(BadRanges, match="the log goes on after"):
            reshard.load(tmp_path / "crashed", count)
    reshard.write(reshard.load(source, count), out)
    if count == 1:
        shutil.move(out, tmp_path / "new" / "range-0")
        out = tmp_path / "new"
    for restarts in range(2):  # the log goes on from the first start
        with serving_ranges(out, count, resume=True) as ranges:
            assert thetas(ranges) == before
            assert {live.core.central.version for live in ranges.lives} == {2 + restarts}
            commit_all(ranges.joined("ann", TWO))
            before = thetas(ranges)


def test_a_server_says_how_to_start_with_another_range(tmp_path: Path) -> None:
    with serving_ranges(tmp_path) as ranges:
        ranges.started("ann")
    with (
        pytest.raises(Exception, match=r"holds range 1/2 .*--range 0/1: .*gem-ctl reshard"),
        serving(config(SUMS, checkpoint_dir=tmp_path / "range-1", resume=True, durability="log")),
    ):
        pass
