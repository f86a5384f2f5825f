"""What --durability promises, against real servers. A copy of the folder is what a kill -9 leaves at that moment."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from durability.checkpoint_helpers import crashed
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError, Overloaded, Session, connect
from gem_ctl import text
from gem_server.config import ServerConfig, StartError
from gem_server.durability import segment, storage
from gem_server.durability.capture import Capture
from gem_server.durability.scratch import Scratch
from kit.logs import Lines
from kit.model import GRADIENT, Patience, ended, in_background, model, outcomes, theta, version, workers
from kit.pauses import Pause
from kit.raw_client import SMALL, wired
from kit.regions import abstract, linux_only
from kit.server import DEADLINE, Live, config, serving, wait_until
from simulation.truth import fingerprint


def state(live: Live) -> bytes:
    return live.on_loop(lambda: fingerprint(live.core))


def leased_shard(live: Live, session: Session) -> int:
    """The id of a shard that the session's worker gets now."""
    lease_id = session._member.registration.lease_id
    return int(live.on_loop(lambda: live.core.lease_shard(lease_id, 400, live.clock()).shard_id))


KINDS: list[Any] = [
    ({"shared_memory": False}, True),
    ({"shared_memory": False, "gradient_dtype": "int8", "theta_dtype": "bfloat16"}, False),
    ({"shared_memory": False, "gradient_dtype": "bfloat16"}, True),
    pytest.param({"shared_memory": True}, False, marks=linux_only),
]


@pytest.mark.parametrize(("kind", "overlap"), KINDS)
def test_after_a_crash_the_run_is_what_it_was_to_the_bit(
    kind: dict[str, Any], overlap: bool, logged: ServerConfig, tmp_path: Path
) -> None:
    random = np.random.default_rng(1)
    logged = replace(logged, hyperparameters=replace(logged.hyperparameters, average=0.75))
    with serving(logged) as live, ExitStack() as sessions:
        joined = [sessions.enter_context(connect(live.address, name=f"w{number}", **kind)) for number in range(3)]
        batches = []
        for session in joined:
            session.join(model(), overlap=overlap)
            batches.append(iter(session.shards(400)))
        for turn in range(12):
            session, mine = joined[turn % 3], batches[turn % 3]
            next(mine)
            session.commit(random.normal(size=9).astype(np.float32), loss=float(turn), samples=4)
            if turn == 7:
                joined[0].pull()
        joined[2].close()
        before = state(live)
        with serving(crashed(live, tmp_path / "crashed")) as back:
            assert state(back) == before
            assert version(back) == 12
        assert state(live) == before


@pytest.mark.parametrize(("then", "overlap"), [("snapshot", False), ("memory", True)])
def test_workers_of_a_start_without_a_log_lose_their_commits(
    then: str, overlap: bool, logged: ServerConfig, tmp_path: Path
) -> None:
    """The start after that finds the log's end as it was, and knows nothing of what was acknowledged meanwhile."""
    with ExitStack() as open_:
        live = open_.enter_context(serving(logged))
        session = open_.enter_context(connect(live.address, name="ann", shared_memory=False, retry=Patience().retry()))
        session.join(model(), overlap=overlap)
        session.commit(GRADIENT)
        resumed = crashed(live, tmp_path / "crashed")
        live.stop()
        dealt: set[int] = set()
        for life, durability in enumerate((then, then, "log")):
            assert resumed.checkpoint_dir is not None
            kept = shutil.copytree(resumed.checkpoint_dir, tmp_path / f"kept-{life}")
            live = open_.enter_context(serving(replace(resumed, listen=live.address, durability=durability)))
            assert session.commit(GRADIENT).lost is (life > 0), "what the start before acknowledged is gone"
            assert not session.commit(GRADIENT).lost
            shard_id = leased_shard(live, session)
            assert shard_id not in dealt, "a worker of before may still complete that shard"
            dealt.add(shard_id)
            live.stop()
            resumed = replace(resumed, checkpoint_dir=kept)  # it was killed before its first checkpoint


def test_a_checkpoint_cuts_the_log_and_the_log_goes_on(logged: ServerConfig, tmp_path: Path) -> None:
    """Also for the checkpoint before the newest: the segments between are kept as long as it is."""
    with (
        serving(replace(logged, checkpoint_keep=2)) as live,
        connect(live.address, name="ann") as session,
        Admin(live.address) as admin,
    ):
        session.join(model())
        for _ in range(4):
            session.commit(GRADIENT)
            admin.checkpoint()
        session.commit(GRADIENT)
        before, folder = state(live), crashed(live, tmp_path / "crashed")
        assert folder.checkpoint_dir is not None
        assert len(list((folder.checkpoint_dir / "log").iterdir())) == 2
        newest = max(folder.checkpoint_dir.glob("checkpoint-*"))
        (newest / "model.safetensors").write_bytes(b"")
        with serving(folder) as back:
            assert state(back) == before


def test_a_checkpoint_is_written_though_its_asker_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or workers' buffers would be kept for it for ever."""
    copying = Pause(monkeypatch, Capture, "copy_theta")
    with serving(config(checkpoint_dir=tmp_path)) as live, connect(live.address) as session:
        session.join(model())
        session.commit(GRADIENT)
        with Admin(live.address) as admin:
            answer = in_background(admin.checkpoint)
            copying.reached()
        with pytest.raises(GemError):
            answer.result(DEADLINE)
        copying.end()
        wait_until(lambda: list(tmp_path.glob("checkpoint-*-0001")), "the checkpoint")
        wait_until(lambda: not any(lease.before_change for lease in live.core.leases.live.values()), "its buffers to be let go")


def test_nothing_is_acknowledged_before_the_first_checkpoint(
    logged: ServerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """θ has its first value then, and the log does not follow anything yet."""
    writing = Pause(monkeypatch, Scratch, "prepare")
    with serving(logged) as live, connect(live.address) as ann, connect(live.address) as bob:
        first = in_background(lambda: ann.join(model()))
        writing.reached()
        second = in_background(lambda: (bob.join(model()), bob.commit(GRADIENT)))
        log = live.server.wiring.group_commit
        assert log is not None
        wait_until(lambda: log._order._waiters or second.done(), "bob's answer, or that it waits")
        assert not second.done()
        assert not list(tmp_path.glob("run/checkpoint-*"))
        writing.end()
        first.result(DEADLINE)
        assert second.result(DEADLINE)[1].version == 1


def test_a_stop_during_the_first_checkpoint_keeps_the_value(logged: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was acknowledged yet, and the log has nothing to follow: it must not be waited for."""
    writing = Pause(monkeypatch, Scratch, "prepare")
    live = Live(logged)
    with wired(live) as wire:
        answer = in_background(partial(wire.join("ann").initialize, np.ones(SMALL.size, np.float32)))
        writing.reached()
        live.on_loop(lambda: live.server.stop("test"))
        wait_until(lambda: live.server.wiring.apply_loop._closed, "the queue to be closed")
        writing.end()
        live._thread.join(DEADLINE)
        assert not live._thread.is_alive()
        live.stop()
        assert answer.exception(DEADLINE) is not None
    with serving(replace(logged, resume=True, memory_socket=abstract())) as back:
        assert (version(back), theta(back).size) == (0, SMALL.size)


def test_waiting_workers_go_on_though_the_checkpoint_failed(logged: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(scratch: Scratch, count: int) -> Scratch:
        raise MemoryError

    monkeypatch.setattr(Scratch, "prepare", failed)
    with serving(logged) as live, wired(live) as wire:
        ann, bob = wire.join("ann"), wire.join("bob")
        answer = in_background(bob.pull)
        wait_until(lambda: live.on_loop(lambda: live.server.wiring.intake.calls._by_lease), "bob to wait")
        with pytest.raises(grpc.RpcError, match="first checkpoint"):
            ann.initialize(np.ones(SMALL.size, np.float32))
        wait_until(answer.done, "bob's answer")
        monkeypatch.undo()


# -- a full disk


FREE = 39 << 20


class Disk:
    """Makes writing to the log fail, although FREE bytes are free."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full = False  # nothing can be written
        self.crowded = False  # no segment can begin
        write, allocate = storage._File.write, storage._File.allocate

        def wrote(file: Any, offset: int, pieces: Any) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(file, offset, pieces)

        def allocated(file: Any, nbytes: int) -> None:
            if self.full or self.crowded:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            allocate(file, nbytes)

        patch.setattr(storage._File, "write", wrote)
        patch.setattr(storage._File, "allocate", allocated)
        patch.setattr(storage.Storage, "free", lambda storage, path: FREE)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.full = disk.crowded = False


def impatient(live: Live, name: str) -> tuple[Session, Patience]:
    patience = Patience()
    return connect(live.address, name=name, retry=patience.retry()), patience


def test_a_full_disk_stops_answers_and_not_the_server(
    logged: ServerConfig, disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gem_server.durability.group_commit.RETRY_SECONDS", 0.01)
    with serving(logged) as live, connect(live.address, name="ann") as session:
        session.join(model())
        session.commit(GRADIENT)
        disk.full = True
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: stalled(live) == 1, "the log to be stalled")
        assert not waiting.done()
        resumed = crashed(live, tmp_path / "crashed")
        disk.full = False
        answer = waiting.result(30)
        assert (answer.version, answer.lost) == (2, False)
        assert stalled(live) == 0
        np.testing.assert_array_equal(theta(live), answer.theta)
    with serving(resumed) as back:
        assert version(back) == 1  # the second commit had not been answered


def test_the_status_says_how_much_room_a_stalled_log_needs(
    logged: ServerConfig, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_ALLOCATION", 64 << 20)
    monkeypatch.setattr("gem_server.durability.group_commit.RETRY_SECONDS", 0.01)
    disk.crowded = True
    with serving(logged) as live, Admin(live.address) as admin:
        with connect(live.address, name="ann", retry=Patience().retry()) as session:
            waiting = in_background(lambda: session.join(model()))
            wait_until(lambda: admin.status().state == pb.RUN_STATE_STALLED, "the log to be stalled")
            live.clock.advance(90)
            run = admin.status()
            assert (run.stall.needed_bytes, run.stall.free_bytes) == (64 << 20, FREE)
            assert 90 <= run.stall.seconds < 90 + DEADLINE
            (line,) = [line for line in text.status(run).splitlines() if line.startswith("stalled")]
            assert re.match(
                r"stalled +for 0:0[12]:\d\d: the log needs 64 MiB, 39 MiB are free; too little room on the disk of the "
                "server's log: free space there",  # it does not say that no space is left
                line,
            )
            live.on_loop(live.server.wiring.checkpointer.after_write)
            assert admin.status().state == pb.RUN_STATE_STALLED, "a checkpoint that is written makes no room for the log"
            disk.crowded = False
            waiting.result(DEADLINE)
        run = admin.status()
        assert (run.state, run.HasField("stall")) == (pb.RUN_STATE_TRAINING, False)


def test_a_stalled_log_gives_no_leases_to_workers_that_try_again(
    logged: ServerConfig, disk: Disk, warned: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gem_server.durability.group_commit.RETRY_SECONDS", 0.01)
    with serving(logged) as live, connect(live.address, name="ann") as session:
        session.join(model())
        disk.full = True
        waiting = in_background(lambda: session.commit(GRADIENT))
        wait_until(lambda: stalled(live) == 1, "the log to be stalled")
        records = live.server.registry.get_sample_value("gem_log_waiting_records")
        for name in ("ann", "bob"):
            _try_to_join(live, name)
        seen = (
            workers(live),
            ended(live),
            "rejected" in outcomes(live),
            live.server.registry.get_sample_value("gem_log_waiting_records"),
        )
        disk.full = False
        waiting.result(DEADLINE)
    assert seen == (["ann"], {}, False, records)
    assert [line["event"] for line in warned] == ["no commit is acknowledged until there is room on the disk"]


def _try_to_join(live: Live, name: str) -> None:
    session, patience = impatient(live, name)
    with session:
        joining = in_background(lambda: session.join(model()))
        wait_until(lambda: patience.pauses > 5, "the worker to try again")
        patience.run_out()
        with pytest.raises(Overloaded):
            joining.result(DEADLINE)


@pytest.mark.parametrize(("call", "error"), [("sync", errno.ENOSPC), ("write", errno.EIO)])
def test_a_disk_that_fails_ends_the_server(
    call: str, error: int, logged: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it turns out to be full only when it syncs, as with quotas and network file systems, what was written may be gone."""

    def fail(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    live = Live(logged)
    session, patience = impatient(live, "ann")
    with session:
        session.join(model())
        session.commit(GRADIENT)
        monkeypatch.setattr(storage._File, call, fail)
        patience.run_out()
        with pytest.raises(GemError):
            session.commit(GRADIENT)
    with pytest.raises(StartError, match=f"log: .*{os.strerror(error)}"):
        live._thread.join(30), live.stop()
    monkeypatch.undo()
    with serving(replace(logged, resume=True)) as back:
        assert version(back) in (1, 2)


def stalled(live: Live) -> float | None:
    return live.server.registry.get_sample_value("gem_log_stalled")


# -- wrong use


def test_a_hole_in_the_log_is_refused_and_named(logged: ServerConfig, tmp_path: Path) -> None:
    with serving(logged) as live, connect(live.address, name="ann") as session:
        session.join(model())
        for _ in range(5):
            session.commit(GRADIENT)
        damaged = crashed(live, tmp_path / "crashed")
    assert damaged.checkpoint_dir is not None
    (path,) = (damaged.checkpoint_dir / "log").iterdir()
    data = bytearray(path.read_bytes())
    second = data.index(b"GEMr", data.index(b"GEMr") + 4)
    data[second + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(StartError, match=r"segment-00000001 has a hole: record 2"):
        Live(damaged)
