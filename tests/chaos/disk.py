"""A disk that fills up, has room again, and fills up again while the server is killed: a small file system in memory.

Mounting one takes the rights of root; where they are missing nothing is done.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chaos.checker import Verdict, check
from chaos.cluster import Cluster
from chaos.server_process import DEADLINE
from chaos.worker import Kind
from kit.server import wait_until

KINDS = [Kind(shared_memory=True), Kind(shards=True)]
PARAMETERS = 200_000
_DISK_MIB = 400  # a segment takes 64 MiB at a time, a start a segment
REFUSAL = "too little room on the disk of the server's log"


@dataclass
class DiskReport:
    """The result.

    Attributes:
        possible: Whether a small file system could be mounted; if not, nothing else was done.
        stalls: How often the disk was full and the server stopped acknowledging.
        recovered: How often it went on.
        workers_told: Workers whose SDK was told why.
    """

    possible: bool = True
    stalls: int = 0
    recovered: int = 0
    workers_told: int = 0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def good(self) -> bool:
        return not self.possible or (self.verdict.good and self.recovered == self.stalls == 2)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "verdict": self.verdict.as_dict()}

    def text(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """Mounts a small file system at a path for a `with` block. Yields whether that was possible."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "gem-chaos", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)  # a checker that failed may still map files of it


class Ballast:
    """Writes a file that fills the rest of a disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def drop(self) -> None:
        self._path.unlink()

    def fill(self) -> None:
        with self._path.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)) == 1 << 16:
                    pass
            except OSError:
                pass  # full


def stalled(cluster: Cluster) -> bool:
    """Whether the server's metric `gem_log_stalled` is 1."""
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.leader.metrics_port}/metrics", timeout=10) as answer:
        return "\ngem_log_stalled 1.0\n" in answer.read().decode()


def run(folder: Path, seed: int) -> DiskReport:
    """Fills the disk twice; the second time the server is killed while it is full."""
    report = DiskReport()
    with small_disk(folder / "small") as report.possible:
        if report.possible:
            _run(folder, seed, report)
    return report


def _run(folder: Path, seed: int, report: DiskReport) -> None:
    disk = folder / "small"
    ballast = Ballast(disk)
    cluster = Cluster(
        folder / "cluster", seed, PARAMETERS, KINDS,
        checkpoints=disk / "checkpoints", checkpoint_interval=0, bytes_between_faults=1 << 40,
    )  # fmt: skip
    try:
        cluster.wait_acknowledged(10)
        _fill(cluster, ballast, report)
        ballast.drop()
        cluster.wait_acknowledged(20)
        wait_until(lambda: not stalled(cluster), "the metric says that all is well", DEADLINE)
        report.recovered += 1
        _fill(cluster, ballast, report)
        cluster.leader.kill()
        ballast.drop()
        cluster.leader.start()
        cluster.wait_acknowledged(20)
        assert not stalled(cluster)
        report.recovered += 1
        cluster.finish()
        report.verdict = check([cluster.leader.checkpoints], cluster.diaries.paths())
    finally:
        cluster.close()
    report.workers_told = sum(REFUSAL in path.read_text() for path in cluster.diaries.paths())


def _has_more_refusals(path: Path, before: int) -> bool:
    return path.read_text().count(REFUSAL) > before


def _fill(cluster: Cluster, ballast: Ballast, report: DiskReport) -> None:
    """Waits until the server acknowledges no more commits and every worker has got that error."""
    told = {path: path.read_text().count(REFUSAL) for path in cluster.diaries.paths()}
    ballast.fill()
    wait_until(lambda: stalled(cluster), "the metric says that the log is stalled", DEADLINE)
    for path, before in told.items():
        wait_until(partial(_has_more_refusals, path, before), f"{path.name} is told", DEADLINE)
    cluster.leader.require_alive()
    report.stalls += 1
