"""The log holds what was answered, whichever way the commits came."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gem_api.v1 import tensors_pb2
from gem_server.durability.journal import Stall
from kit.raw_client import SMALL, chunk, theta_bits
from kit.ways import all_ways, running, through_sockets


@all_ways
def test_a_commit_that_was_answered_survives_a_crash_and_is_answered_again(way: str, tmp_path: Path) -> None:
    with running(way, checkpoint_dir=tmp_path / "run", durability="log") as (live, wire):
        worker = wire.started("worker")
        for value in (0.5, -3.0, 0.25):
            answer, theta = worker.commit(value)
        before = theta_bits(live)
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    with running(way, checkpoint_dir=tmp_path / "crashed", durability="log", resume=True) as (live, wire):
        worker.wire = wire
        assert theta_bits(live) == before
        again, theta_again = worker.whole(worker.header(sequence=3, base_version=2), *worker.body(9.0)).answer(SMALL.size)
        assert (again, theta_again.tobytes()) == (answer, theta.tobytes())
        assert worker.commit()[0].version == 4


@all_ways
def test_no_commit_is_taken_while_the_disk_is_full(way: str, tmp_path: Path) -> None:
    with running(way, checkpoint_dir=tmp_path / "run", durability="log") as (live, wire):
        worker = wire.started("worker")
        worker.commit()
        before = theta_bits(live)
        group_commit = live.server.wiring.group_commit
        assert group_commit is not None
        journal = group_commit.journal
        live.on_loop(lambda: setattr(journal, "stall", Stall("the disk is full: free some space", 0.0, 0, 0)))
        refusal = worker.whole(worker.header(), *worker.body()).refusal()
        assert (refusal.error, "free some space" in refusal.details) == ("OVERLOADED", True)
        assert theta_bits(live) == before
        live.on_loop(lambda: setattr(journal, "stall", None))
        assert worker.commit()[0].version == 2


@through_sockets
@pytest.mark.parametrize("room", [True, False])
def test_compressed_gradients_are_kept_for_the_log_as_far_as_there_is_memory(room: bool, way: str, tmp_path: Path) -> None:
    """They count; without room the log gets what they were decoded to, and the run is the same after a crash."""
    packed = np.full(SMALL.size, 0x3FC0, np.uint16).tobytes()  # 1.5
    with running(way, checkpoint_dir=tmp_path / "run", durability="log") as (live, wire):
        worker = wire.started("worker")
        held = live.core.memory.held
        live.on_loop(lambda: setattr(live.core.memory, "limit", held + len(packed) - (not room)))
        for sequence in (1, 2):
            header = worker.header(sequence=sequence, base_version=sequence - 1, wire_dtype=tensors_pb2.WIRE_DTYPE_BFLOAT16)
            worker.whole(header, chunk(0, packed)).answer(SMALL.size)
        assert live.core.memory.held == held + len(packed) * room
        before = theta_bits(live)
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    with running(way, checkpoint_dir=tmp_path / "crashed", durability="log", resume=True) as (live, wire):
        assert theta_bits(live) == before
