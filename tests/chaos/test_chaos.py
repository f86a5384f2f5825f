"""Real processes killed with -9, real connections cut, a real disk filled, and no promise broken. `make chaos` does more."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import disk, ranges_run, run
from chaos.faults import KINDS


@pytest.mark.long
def test_nothing_acknowledged_is_lost_or_doubled_whoever_is_killed(tmp_path: Path) -> None:
    report = run.run(tmp_path / "run", seed=1, server_kills=5, worker_kills=5, parameters=20_000, bytes_between_faults=500_000)
    assert report.verdict.good, report.text()
    assert (report.server_kills, report.worker_kills) == (5, 5)
    assert report.connections.get("cut", 0) > 0
    assert report.verdict.resent > 0
    assert report.transports.keys() == {"memory", "tcp", "grpc"}
    assert report.verdict.acknowledged <= report.verdict.applied


@pytest.mark.long
def test_with_two_ranges_nothing_acknowledged_is_lost_or_doubled_in_either(tmp_path: Path) -> None:
    report = ranges_run.run(
        tmp_path / "run", seed=1, server_kills=2, worker_kills=2, suspensions=0, parameters=20_000,
        bytes_between_faults=500_000, kinds=KINDS[:4],
    )  # fmt: skip
    assert report.verdict.good, report.text()
    assert (report.kills_by_range, report.worker_kills) == ([2, 2], 2)
    assert report.connections.get("cut", 0) > 0
    assert report.transports.keys() >= {"memory", "tcp"}
    assert 0 < report.verdict.committed <= report.verdict.whole
    assert sum(report.verdict.torn.values()) == sum(report.verdict.torn_by_range) <= report.worker_kills
    assert report.verdict.shards_completed > 0


@pytest.mark.slow
def test_a_full_disk_stops_acknowledgements_and_loses_nothing(tmp_path: Path) -> None:
    report = disk.run(tmp_path, seed=1)
    if not report.possible:
        pytest.skip("it takes root to mount a small file system")
    assert report.good, report.text()
    assert report.workers_told == len(disk.KINDS)
