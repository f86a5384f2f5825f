"""Real processes killed with -9, real connections cut, a real disk filled, and no promise broken. `make chaos` does more."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import disk
from chaos.attack import attack
from chaos.report import KINDS, PACED
from chaos.worker import Kind


@pytest.mark.long
@pytest.mark.parametrize(
    ("servers", "kills", "kinds", "optimizer"), [(1, 5, KINDS, "sgd"), (2, 2, PACED[:4], "adamw")], ids=["one", "two"]
)
def test_nothing_acknowledged_is_lost_or_doubled(
    servers: int, kills: int, kinds: list[Kind], optimizer: str, tmp_path: Path
) -> None:
    report = attack(
        tmp_path / "run", servers=servers, seed=1, server_kills=kills, worker_kills=kills, parameters=20_000,
        bytes_between_faults=500_000, kinds=kinds, optimizer=optimizer, in_step=servers > 1,
    )  # fmt: skip
    verdict = report.verdict
    assert verdict.good, report.text()
    assert (report.kills_by_range, report.worker_kills) == ([kills] * servers, kills)
    assert report.connections.get("cut", 0) > 0
    assert any(server.resent for server in verdict.ranges)
    assert report.transports.keys() >= ({"memory", "tcp", "grpc"} if kinds is KINDS else {"memory", "tcp"})
    assert 0 < verdict.committed <= verdict.whole
    assert sum(verdict.torn.values()) == sum(verdict.torn_by_range) <= report.worker_kills
    assert verdict.shards_completed > 0
    assert servers == 1 or all(server.smaller and server.released for server in verdict.ranges)


@pytest.mark.slow
def test_a_full_disk_stops_acknowledgements_and_loses_nothing(tmp_path: Path) -> None:
    report = disk.run(tmp_path, seed=1)
    if not report.possible:
        pytest.skip("it takes root to mount a small file system")
    assert report.good, report.text()
    assert report.workers_told == len(disk.KINDS)
