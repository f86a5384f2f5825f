"""The log holds what was answered, whichever way the commits came."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gem_server.durability import segment
from gem_server.durability.journal import Stall
from kit.raw_client import SMALL, theta_bits
from kit.ways import all_ways, running


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_ALLOCATION", 1 << 16)


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
        group_commit = live.server.parts.group_commit
        assert group_commit is not None
        journal = group_commit.journal
        live.on_loop(lambda: setattr(journal, "stall", Stall("the disk is full: free some space", 0.0, 0, 0)))
        refusal = worker.whole(worker.header(), *worker.body()).refusal()
        assert (refusal.error, "free some space" in refusal.details) == ("OVERLOADED", True)
        assert theta_bits(live) == before
        live.on_loop(lambda: setattr(journal, "stall", None))
        assert worker.commit()[0].version == 2
