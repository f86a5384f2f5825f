"""Memory and cores are those of the process's own control groups, not of the whole machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gem_api.process import host_limits
from gem_api.process.host_limits import cores, default_limit

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores without control groups: its folder, with `own` in place of /proc/self/cgroup."""
    monkeypatch.setattr(host_limits, "_ROOT", tmp_path)
    monkeypatch.setattr(host_limits, "_OWN", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_control_groups_it_is_the_machines(groups: Path) -> None:
    assert (cores(), default_limit()) == (8, int(0.8 * MEMORY))


@pytest.mark.parametrize("limited", ["system.slice/run.scope", "system.slice", ""])
def test_a_limit_of_ones_own_group_or_of_one_above_it_counts(limited: str, groups: Path) -> None:
    write(groups / "own", "0::/system.slice/run.scope")
    for folder in ("system.slice/run.scope", "system.slice", ""):
        write(groups / folder / "cpu.max", "250000 100000" if folder == limited else "max 100000")
        write(groups / folder / "memory.max", "1000" if folder == limited else "max")
    write(groups / "other.slice/cpu.max", "1000 100000")
    assert (cores(), default_limit()) == (3, 800)


@pytest.mark.parametrize("path", ["/job/step", "/docker/0123"])
def test_the_first_version_of_control_groups_is_read_too(path: str, groups: Path) -> None:
    """In a container, the path is the one outside, and the limits lie in the root."""
    write(groups / "own", f"4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/")
    inside = "" if "docker" in path else path.strip("/")
    write(groups / "cpu" / inside / "cpu.cfs_quota_us", "50000")
    write(groups / "cpu" / inside / "cpu.cfs_period_us", "100000")
    write(groups / "memory" / inside / "memory.limit_in_bytes", "2000")
    assert (cores(), default_limit()) == (1, 1600)


def test_without_a_limit_in_the_first_version_it_is_the_machines(groups: Path) -> None:
    write(groups / "own", "4:memory:/\n1:cpu:/")
    write(groups / "cpu/cpu.cfs_quota_us", "-1")
    write(groups / "cpu/cpu.cfs_period_us", "100000")
    write(groups / "memory/memory.limit_in_bytes", str(2**63 - 4096))
    assert (cores(), default_limit()) == (8, int(0.8 * MEMORY))
