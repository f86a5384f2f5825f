"""Reads facts about processes and this machine from Linux's /proc."""

from __future__ import annotations

import os
import platform
import signal
import ssl
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_DYING_SECONDS = 10.0  # maximum time for a process to end; a large one takes long


def tree(roots: Iterable[int]) -> list[int]:
    """The ids of these processes and of all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(roots)
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes have used so far, in user and kernel mode; their dead threads included."""
    return sum(int(fields[11]) + int(fields[12]) for fields in map(_stat, pids) if fields) / _TICKS


def available_bytes() -> int:
    """Memory that new processes can use without swapping."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def kill(pids: Collection[int]) -> None:
    """Kills these processes and waits until they have ended. They need not be children of this one."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _DYING_SECONDS
    while any(fields[0] not in "ZX" for fields in map(_stat, pids) if fields) and time.monotonic() < deadline:
        time.sleep(0.01)


def description() -> dict[str, str | int]:
    """A description of the machine that the figures were measured on."""
    models = [line for line in (_PROC / "cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
    }


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name (state first); empty for a process that has gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
