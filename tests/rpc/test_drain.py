"""A server shuts down gracefully, resumes where it was, and says what is wrong if it can't start."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import admin_pb2
from gem_api.v1 import training_pb2 as pb
from gem_server.cli import main
from gem_server.config import StartError
from gem_server.core.state_machine import MIN_COMMITS
from kit.logs import Lines, captured
from kit.ports import free_address
from kit.process import server_process
from kit.raw_client import SMALL, Wire, Worker, apply_thread_held, chunk, theta_bits, wired
from kit.regions import linux_only, queue_length
from kit.server import Live, config, serving, wait_until
from kit.settings import configured
from kit.ways import all_ways, opened, read_by_the_server, running

P = SMALL.size


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def two_checkpoints(folder: Path) -> Worker:
    """Leaves a folder with the checkpoints of versions 1 and 2; returns the worker that committed."""
    with serving(config(checkpoint_dir=folder)) as live, wired(live) as wire:
        worker = wire.started("worker")
        worker.commit()
        wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
        worker.commit()
    assert checkpoints(folder) == ["checkpoint-000000000001-0001", "checkpoint-000000000002-0001"]
    return worker


# -- the end


def test_a_complete_run_is_said_once_when_its_workers_have_left() -> None:
    with captured(logging.INFO) as said, serving(config()) as live, wired(live) as wire:
        worker = wire.started("worker")
        lease = worker.lease_id
        shard = wire.call("LeaseShard", pb.LeaseShardRequest(lease_id=lease, sample_count=64)).shard
        wire.call("CompleteShard", pb.CompleteShardRequest(lease_id=lease, shard_id=shard.shard_id))
        live.on_loop(live.server._note_completion)
        assert completed(said) == [], "a worker is still there"
        worker.leave()
        for _ in range(2):
            live.on_loop(live.server._note_completion)
    assert len(completed(said)) == 1
    assert "gem-ctl pull" in completed(said)[0]


@pytest.mark.parametrize(("versions", "warnings"), [(64, 1), (120, 0)])
def test_a_schedule_that_ends_long_before_the_run_is_said_once(versions: int, warnings: int) -> None:
    settings = Hyperparameters(epochs=2, learning_rate=0.5, schedule="cosine", decay_versions=versions, decay_factor=0.0)
    with captured() as said, serving(config(settings)) as live, wired(live) as wire:
        worker = wire.started("worker")
        wire.call("LeaseShard", pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=64))
        for _ in range(MIN_COMMITS - 1):
            worker.commit()  # of one sample
        live.on_loop(live.server._check_schedule)
        assert schedules(said) == [], "too few commits to know how many there will be"
        worker.commit()
        for _ in range(2):
            live.on_loop(live.server._check_schedule)
    assert [line["schedule"] for line in schedules(said)] == [
        "cosine:warmup=0,warmup_factor=0.0,versions=128,factor=0.0"
    ] * warnings


@pytest.mark.parametrize(("limits", "warnings"), [({"epochs": 2}, 1), ({"epochs": 0, "steps": 99}, 0)])
def test_epochs_that_no_worker_takes_shards_of_are_said_once(limits: dict[str, int], warnings: int) -> None:
    with captured() as said, serving(config(Hyperparameters(**limits))) as live, wired(live) as wire:  # type: ignore[arg-type]
        worker = wire.started("worker")
        for _ in range(30):
            worker.commit()
        for _ in range(2):
            live.on_loop(live.server._check_end)
    assert len([line for line in said if "so --epochs does not end this run" in line["event"]]) == warnings


def schedules(said: Lines) -> Lines:
    return [line for line in said if "the schedule ends after about 50 % of the run" in line["event"]]


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_run_that_becomes_complete_is_on_the_disk_before_the_next_interval(durability: str, tmp_path: Path) -> None:
    often = {"checkpoint_interval": 3600.0, "durability": durability}
    with serving(config(checkpoint_dir=tmp_path, **often)) as live, wired(live) as wire:  # type: ignore[arg-type]
        worker = wire.started("worker")
        shard = wire.call("LeaseShard", pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=64)).shard
        wait_until(lambda: checkpoints(tmp_path), "the first checkpoint")
        worker.commit()
        wire.call("CompleteShard", pb.CompleteShardRequest(lease_id=worker.lease_id, shard_id=shard.shard_id))
        wait_until(lambda: checkpoints(tmp_path)[-1:] == ["checkpoint-000000000001-0001"], "that of the complete run")


def completed(said: Lines) -> list[str]:
    return [line["event"] for line in said if line["event"].startswith("run complete")]


@all_ways
@pytest.mark.parametrize("by", ["stop", "Drain"])
def test_what_is_queued_is_applied_and_answered_and_everyone_else_is_sent_away(by: str, way: str, tmp_path: Path) -> None:
    with running(way, checkpoint_dir=tmp_path) as (live, wire):
        uploading, idling, *committing = wire.crew(5)
        idle = idling.stream()
        idling.commit_on(idle)
        upload = read_by_the_server(live, uploading, uploading.header(), chunk(0, bytes(8)))  # nothing in memory
        with apply_thread_held(live) as release:
            queued = [worker.stream(worker.header(), *worker.body()) for worker in committing]
            wait_until(lambda: queue_length(live) == 3, "three commits to be queued")
            if by == "Drain":
                assert wire.call("Drain", admin_pb2.DrainRequest()).queue_length == 3
            else:
                live.on_loop(lambda: live.server.stop("test"))
            for stream in (upload, idle):
                refusal = stream.refusal()
                assert refusal.error == "DRAINING"
                assert refusal.status in (None, grpc.StatusCode.UNAVAILABLE)
            assert wire.status().state == pb.RUN_STATE_DRAINING
            release()
            assert sorted(stream.answer(P)[0].version for stream in queued) == [2, 3, 4]
            assert {stream.refusal().error for stream in queued} == {"DRAINING"}
        live.stop()
        assert live.core.central.version == 4
    assert checkpoints(tmp_path) == ["checkpoint-000000000004-0001"]


def test_who_waits_for_a_first_value_is_sent_away(live: Live, wire: Wire) -> None:
    wire.join("asked")
    waiting = wire.join("waiting").open_pull()
    wait_until(lambda: live.on_loop(lambda: any(c.exchanging for c in live.server.wiring.intake.calls._all)), "it to wait")
    wire.call("Drain", admin_pb2.DrainRequest())
    assert waiting.refusal().error == "DRAINING"


LATE_CALLS: dict[str, Callable[[Worker], tuple[str, list[bytes]]]] = {
    "RegisterWorker": lambda w: ("RegisterWorker", [_registration()]),
    "Commit": lambda w: ("Commit", [w.header(), *w.body()]),
    "Pull without a lease": lambda w: ("Pull", [pb.PullRequest().SerializeToString()]),
    "Pull": lambda w: ("Pull", [pb.PullRequest(lease_id=w.lease_id).SerializeToString()]),
    "CreateCheckpoint": lambda w: ("CreateCheckpoint", [admin_pb2.CreateCheckpointRequest().SerializeToString()]),
    "LeaseShard": lambda w: ("LeaseShard", [pb.LeaseShardRequest(lease_id=w.lease_id, sample_count=9).SerializeToString()]),
    "OpenLane": lambda w: ("OpenLane", [pb.OpenLaneRequest(lease_id=w.lease_id).SerializeToString()]),
}


def _registration() -> bytes:
    return pb.RegisterWorkerRequest(worker_name="late", layout=SMALL.to_message()).SerializeToString()


@pytest.mark.parametrize("what", LATE_CALLS)
def test_who_comes_too_late_is_sent_away_at_once(what: str, tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live, wired(live) as wire:
        worker = wire.started("worker")
        rpc, frames = LATE_CALLS[what](worker)
        with apply_thread_held(live):
            wire.call("Drain", admin_pb2.DrainRequest())
            wait_until(lambda: wire.status().state == pb.RUN_STATE_DRAINING, "the server to drain")
            refusal = wire.whole(rpc, *frames, timeout=10).refusal()
            assert (refusal.status, refusal.error) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    live = Live(config(checkpoint_dir=folder))
    with wired(live) as wire:
        wire.started("worker")
    shutil.rmtree(folder)
    folder.write_text("a file is in the way")
    with pytest.raises(StartError, match="the last checkpoint could not be written"):
        live.stop()


# -- coming back


def test_a_resumed_server_goes_on_at_its_version_with_its_workers_and_its_run(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live, wired(live) as wire:
        worker = wire.started("worker")
        worker.commit()
        shard = pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=10)
        held = wire.call("LeaseShard", shard).shard
        before, run = theta_bits(live), wire.status().run_id
    with serving(config(checkpoint_dir=tmp_path, resume=True)) as live, wired(live) as wire:
        worker.wire = wire
        status = wire.status()
        assert (status.run_id, status.version, [each.name for each in status.workers]) == (run, 1, ["worker"])
        assert theta_bits(live) == before
        done = pb.CompleteShardRequest(lease_id=worker.lease_id, shard_id=held.shard_id)
        assert wire.call("CompleteShard", done).accepted
        assert worker.commit()[0].version == 2


def test_resuming_an_empty_folder_starts_a_new_run(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path, resume=True)) as live, wired(live) as wire:
        assert wire.started("worker").commit()[0].version == 1


# -- not starting


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": Hyperparameters(epochs=0, steps=0)}, "set one of them"),
        ({"settings": Hyperparameters(pi_max=1e9)}, r"\[0.001, 1e6\]"),
        ({"resume": True}, "needs --checkpoint-dir"),
        ({"durability": "log"}, "--checkpoint-dir"),
        ({"listen": "no.such.host.invalid:1"}, "can't listen on no.such.host.invalid:1"),
        ({"listen": "localhost"}, "can't listen on 'localhost': give --listen HOST:PORT"),
        ({"metrics_listen": "nonsense"}, "give --metrics-listen HOST:PORT"),
        ({"metrics_listen": "127.0.0.1:99999"}, "give --metrics-listen HOST:PORT"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_impossible_settings_are_refused_with_advice(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message), serving(config(**changes)):
        pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("memory_limit", "plenty", "write 8G or 512M"),
        ("memory_limit", "-1", "can't be negative"),
        ("lease_seconds", "0", "1<=x<=3600"),
        ("lease_seconds", "nan", "lease_seconds"),
        ("checkpoint_interval", "nan", "checkpoint_interval"),
        ("checkpoint_interval", "-1", "x>=0"),
        ("checkpoint_keep", "0", "x>=1"),
    ],
)
def test_a_wrong_setting_is_refused_with_advice(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"GEM_{name.upper()}", value)
    with pytest.raises(click.UsageError) as raised:
        main.make_context("gem-server", [])
    assert message in raised.value.format_message()


def test_a_second_server_that_cannot_start_leaves_the_files_of_the_first_alone(tmp_path: Path) -> None:
    history = tmp_path / "history.csv"
    with serving(config(history=history)) as live, wired(live) as wire:
        worker = wire.started("worker")
        worker.commit()
        with pytest.raises(StartError, match="Address already in use"), serving(config(listen=live.address, history=history)):
            pass
        worker.commit()
    assert [line.split(",")[0] for line in history.read_text().splitlines()[1:]] == ["1", "2"]


# -- the process


@pytest.mark.long
def test_more_ctrl_c_during_the_end_does_not_change_the_exit_status(tmp_path: Path) -> None:
    with server_process(tmp_path, "--listen", "127.0.0.1:0") as server:
        assert server.address
        while server.alive:
            server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_work_writes_a_checkpoint_and_exits_with_0(ending: signal.Signals, tmp_path: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--checkpoint-dir", str(tmp_path / "c"), "--rule", "gem:momentum=0.25")
    variables = {"GEM_LEARNING_RATE": "0.5", "GEM_RULE": "gem:momentum=0.75", "GEM_LEASE_SECONDS": "600"}
    with server_process(tmp_path, *flags, **variables) as server:
        address = server.address
        wire = Wire(address)
        worker = wire.started("worker")
        settings = worker.registration.hyperparameters
        assert (settings.learning_rate, settings.momentum) == (0.5, 0.25)
        stream = wire.stream("Commit")
        assert worker.commit_on(stream)[0].version == 1
        with server_process(tmp_path / "second", "--listen", address) as second:
            assert second.wait() == 2
            (line,) = second.log.splitlines()  # and none of gRPC's own
            assert (
                line == f"gem-server: can't listen on {address}: Address already in use; "
                "give another HOST:PORT with --listen, and beside another server with --metrics-listen too"
            )
        server.process.send_signal(ending)
        assert stream.refusal().error == "DRAINING"
        assert server.wait() == 0, server.log
        wire.close()
    # The first one is written as soon as there is a value, which may be after this commit.
    assert checkpoints(tmp_path / "c")[-1].startswith("checkpoint-000000000001-")


@pytest.mark.long
@linux_only
@pytest.mark.parametrize("durability", ["snapshot", "log"])
@pytest.mark.parametrize("trouble", ["nobody reads it", "its disk is full"])
def test_a_server_that_cannot_write_its_log_lines_goes_on(trouble: str, durability: str, tmp_path: Path) -> None:
    """Rejecting a commit, registering and every way of ending log something."""
    folder, address = tmp_path / "checkpoints", free_address()
    flags = [
        "--listen",
        address,
        "--checkpoint-dir",
        str(folder),
        "--durability",
        durability,
        configured(checkpoint_interval=0),
    ]
    with (
        open("/dev/full", "w", encoding="utf-8") as full,
        server_process(tmp_path, *flags, stderr=full if trouble == "its disk is full" else subprocess.PIPE) as server,
        closing(Wire(address)) as wire,
    ):
        if server.process.stderr is not None:
            server.process.stderr.close()
        wait_until(partial(answers, wire), "the server to serve")
        first = wire.started("over tcp")
        second = wire.join("in memory")
        second.pull()
        for worker, way in ((first, "tcp"), (second, "memory")):
            poisoned = opened(worker, way)
            poisoned.send(worker.header(), *worker.body(math.nan))
            assert poisoned.refusal().error == "NON_FINITE_GRADIENT"
            poisoned.cancel()
            lane = opened(worker, way)
            worker.commit_on(lane)
            lane.cancel()
        assert first.commit()[0].version == 3
        with server_process(tmp_path / "third", "--listen", address, stderr=full) as third:
            assert third.wait() == 2
        assert server.end() == 0
    assert checkpoints(folder)[-1].startswith("checkpoint-000000000003-")


def answers(wire: Wire) -> bool:
    try:
        return bool(wire.status().run_id)
    except grpc.RpcError:
        return False


@pytest.mark.long
def test_a_resumed_process_names_the_checkpoint_that_it_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    two_checkpoints(folder)
    damaged = folder / "checkpoint-000000000002-0001" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with server_process(tmp_path, "--listen", "127.0.0.1:0", "--checkpoint-dir", str(folder), "--resume") as server:
        wire = Wire(server.address)
        assert wire.status().version == 1
        wire.close()
        assert server.end(signal.SIGINT) == 0
    refused = server.events("checkpoint refused")
    assert len(refused) == 1
    assert str(damaged) in refused[0]["why"]
    assert "truncated" in refused[0]["why"]
