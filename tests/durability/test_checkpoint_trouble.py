"""Checkpoints with too little memory or a broken disk: the server reports the error, and training continues."""

from __future__ import annotations

import errno
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from durability.checkpoint_helpers import crashed
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, CheckpointFailed, Session, connect
from gem_server.config import ServerConfig, StartError
from gem_server.core.shards import Deck
from gem_server.durability import tensor_file
from gem_server.durability.capture import Capture
from gem_server.durability.scratch import Scratch
from gem_server.durability.storage import NewFile, Storage
from gem_server.durability.tensor_file import write_tensors
from gem_server.telemetry.history import History
from kit.logs import Lines
from kit.model import GRADIENT, in_background, model, version
from kit.pauses import Pause
from kit.raw_client import SMALL, chunks, initialize_header, wired
from kit.server import DEADLINE, Live, config, serving, wait_until


def leave_no_memory(live: Live) -> None:
    """From now on a checkpoint has no room for copies of the workers' buffers."""

    def limit() -> None:
        live.core.memory.limit = live.core.memory.held

    live.on_loop(limit)


def failures(live: Live) -> float | None:
    return live.server.registry.get_sample_value("gem_checkpoint_failures_total")


def joined(live: Live) -> Session:
    session = connect(live.address, shared_memory=False)
    session.join(model())
    session.commit(GRADIENT)
    return session


def test_a_commit_that_waits_leaves_the_event_loop_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn comes right after θ was copied, before the thread has started that writes the checkpoint."""
    waiting, has_room = threading.Event(), Capture._has_room
    with serving(config(checkpoint_dir=tmp_path)) as live, joined(live) as session, Admin(live.address) as admin:
        leave_no_memory(live)
        copying, writing = (Pause(monkeypatch, Capture, name) for name in ("copy_theta", "tensor"))
        monkeypatch.setattr(Capture, "_has_room", lambda capture, lease: waiting.set() or has_room(capture, lease))
        checkpoint = in_background(admin.checkpoint)
        try:
            copying.reached()
            committing = in_background(lambda: session.commit(GRADIENT))
            wait_until(lambda: live.server.wiring.apply_loop.queue_length, "the commit to be queued")
            copying.end()
            assert waiting.wait(DEADLINE)
            assert version(live) == 1  # the loop answers
        finally:
            copying.end()
            writing.end()
        assert checkpoint.result(DEADLINE).version == 1
        assert committing.result(DEADLINE).version == 2


def test_a_checkpoint_that_fails_at_once_keeps_no_commit_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with serving(config(checkpoint_dir=folder)) as live, joined(live) as session, Admin(live.address) as admin:
        leave_no_memory(live)
        folder.rename(tmp_path / "away")
        folder.touch()
        with pytest.raises(CheckpointFailed, match="File exists"):
            admin.checkpoint()
        assert failures(live) == 1
        assert in_background(lambda: session.commit(GRADIENT)).result(DEADLINE).version == 2
        folder.unlink()
        (tmp_path / "away").rename(folder)
        assert admin.checkpoint().version == 2
        assert failures(live) == 1


def test_a_copy_without_memory_fails_the_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(capture: Capture) -> None:
        raise MemoryError

    with serving(config(checkpoint_dir=tmp_path)) as live, joined(live) as session, Admin(live.address) as admin:
        leave_no_memory(live)
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "copy_theta", exhausted)
            with pytest.raises(CheckpointFailed, match="not enough memory"):
                admin.checkpoint()
        assert failures(live) == 1
        assert in_background(lambda: session.commit(GRADIENT)).result(DEADLINE).version == 2
        assert admin.checkpoint().version == 2


def test_a_checkpoint_stands_though_an_older_one_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(config(checkpoint_dir=tmp_path, checkpoint_keep=1)) as live,
        joined(live) as session,
        Admin(live.address) as admin,
    ):
        admin.checkpoint()
        session.commit(GRADIENT)
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "remove", broken)
            assert admin.checkpoint().version == 2
        assert len(list(tmp_path.glob("checkpoint-*"))) == 2
        session.commit(GRADIENT)
        assert admin.checkpoint().version == 3
        assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_a_failure_says_whether_there_is_an_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Lines
) -> None:
    def said(left: str) -> None:
        wait_until(lambda: f"checkpoint failed; {left}" in [line["event"] for line in warned], left)

    with serving(config(checkpoint_dir=tmp_path, checkpoint_interval=0.02, durability="snapshot")) as live:
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "make_directory", broken)
            session = joined(live)
            said("there is none yet: the model is only in memory")
            with pytest.raises(StartError, match="could not be written; there is none yet: the model is only in memory: could"):
                live.stop()
        session.close()
    assert not list(tmp_path.glob("checkpoint-*"))
    warned.clear()
    with serving(config(checkpoint_dir=tmp_path, checkpoint_interval=0.02, durability="snapshot")) as live:
        session = joined(live)
        wait_until(lambda: list(tmp_path.glob("checkpoint-*")), "a checkpoint")
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "make_directory", broken)
            session.commit(GRADIENT)
            said("the previous one is intact")
        session.close()


def test_a_checkpoint_that_fails_again_and_again_is_tried_less_and_less_often(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live:
        pause = live.server.wiring.checkpointer._pause
        assert [pause(math.inf, failed) for failed in (0, 1, 2, 3, 6, 7, 10**6)] == [1, 1, 2, 4, 32, 60, 60]
        assert [pause(30.0, failed) for failed in (0, 1, 5, 6)] == [1, 1, 16, 30]
        live.server.wiring.progress.checkpointed(1, 0.0)
        assert [pause(30.0, failed) for failed in (0, 1, 9)] == [30, 30, 30]
        live.core.ledger.decks[""] = Deck(samples=1, shard_size=1, epochs=1, next=1)  # the run is complete
        assert [pause(30.0, failed) for failed in (0, 1, 9)] == [0, 1, 60]
        live.core.ledger.decks.clear()
        live.server.wiring.checkpointer.journal = SimpleNamespace(size=1 << 40)  # type: ignore[assignment]
        assert [pause(30.0, failed) for failed in (0, 1, 3, 9)] == [0, 1, 4, 60]
        live.server.wiring.checkpointer.journal = None


def test_a_start_that_keeps_fewer_makes_room(logged: ServerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full of older checkpoints, and of the log that only they need."""
    with serving(logged) as live, connect(live.address) as session, Admin(live.address) as admin:
        session.join(model())
        session.commit(GRADIENT)
        admin.checkpoint()
        crash = crashed(live, tmp_path / "crashed")
    folder = crash.checkpoint_dir
    assert folder is not None
    create = Storage.create

    def crowded(storage: Storage, path: Path) -> NewFile:
        if path.name == "model.safetensors" and (
            len(list(folder.glob("checkpoint-*"))) > 1 or (folder / "log" / "segment-00000001").exists()
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(storage, path)

    monkeypatch.setattr(Storage, "create", crowded)
    with pytest.raises(StartError, match=r"No space left on device.*checkpoint_keep"):
        Live(crash)
    with serving(replace(crash, checkpoint_keep=1)) as live:
        assert version(live) == 1


def broken(storage: Storage, path: Path) -> None:
    raise OSError(errno.EIO, "Input/output error", str(path))


def test_a_history_on_a_stalled_disk_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes lines for a commit long after it was answered."""
    writing = Pause(monkeypatch, History, "flush")
    with serving(config(history=tmp_path / "history.csv")) as live, joined(live) as session:
        try:
            writing.reached()
            assert in_background(lambda: session.commit(GRADIENT)).result(DEADLINE).version == 2
        finally:
            writing.end()


def test_the_names_of_new_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those above them, which a launcher has just made."""
    synced: dict[Path, set[str]] = {}
    sync_directory = Storage.sync_directory

    def sync(storage: Storage, path: Path) -> None:
        sync_directory(storage, path)
        synced[path.absolute()] = {entry.name for entry in path.iterdir()}

    monkeypatch.setattr(Storage, "sync_directory", sync)
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "runs" / "one" / "checkpoints"
    with serving(config(checkpoint_dir=folder, durability="log")):
        for name in (folder / "log", folder, *folder.parents):
            if name != tmp_path:
                assert name.name in synced[name.parent]
            else:
                break


def test_a_file_with_more_tensors_than_can_be_read_back_is_not_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_MAX_HEADER_BYTES", 1000)
    shapes = dict.fromkeys((f"{number:0100d}" for number in range(10)), (0,))
    file = Storage().create(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="10 tensors are too many"):
        write_tensors(file, shapes, lambda name: np.zeros(0, np.float32), {})


def test_waiting_workers_go_on_though_the_call_was_cancelled(logged: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Pause(monkeypatch, Scratch, "prepare")
    with serving(logged) as live, wired(live) as wire:
        ann, bob = wire.join("ann"), wire.join("bob")
        answer = in_background(bob.pull)
        wait_until(lambda: live.on_loop(lambda: live.server.wiring.intake.calls._by_lease), "bob to wait")
        frames = chunks(np.ones(SMALL.size, np.float32), pb.InitializeCentralRequest)
        call = wire.whole("InitializeCentral", initialize_header(ann.lease_id), *frames)
        writing.reached()
        call.cancel()
        wait_until(lambda: len(live.on_loop(lambda: live.server.wiring.intake.calls._all)) == 1, "ann's call to end")
        writing.end()
        assert answer.result(DEADLINE)[0].version == 0
