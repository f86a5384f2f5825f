"""The memory and the cores that the process may use: what its control groups allow, or the machine has."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_DEFAULT_SHARE = 0.8
# A core moves 10 to 15 GB/s, and 16 of them about what a socket's memory gives; more would wait for it.
MAX_APPLY_THREADS = 16


def default_limit() -> int:
    """Four fifths of the memory that the process may use, in bytes; 0 if that is unknown."""
    limits = [limit for text in _texts("memory", "memory.max", "memory.limit_in_bytes") if (limit := _number(text))]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(_DEFAULT_SHARE * min(limits, default=0))


def cores() -> int:
    """The cores that the process may use, at least 1. A share of a core that a control group allows beyond whole ones counts as
    one more."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in _texts("cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"):
        quota, _, period = text.partition(" ")
        if _number(quota) and _number(period):
            count = min(count, math.ceil(_number(quota) / _number(period)))
    return max(1, count)


def apply_threads(servers: int = 1) -> int:
    """The threads that apply a commit of a large model, if this many servers share the machine."""
    return max(1, min(MAX_APPLY_THREADS, cores() // servers))


def _texts(controller: str, name: str, first_version: str) -> Iterator[str]:
    """The contents of the files of the process's control groups, from its own up to the root: `name` in version 2, and the
    files `first_version`, joined by a space, in version 1."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        lines = []
    groups = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines if line.count(":") >= 2}
    owned = next((path for names, path in groups.items() if controller in names.split(",")), "/")
    for folder, path, names in ((_ROOT, groups.get("", "/"), (name,)), (_ROOT / controller, owned, first_version.split())):
        for own in (Path(path), *Path(path).parents):  # a container may see its own group as the root
            with contextlib.suppress(OSError):
                yield " ".join((folder / str(own).lstrip("/") / each).read_text().strip() for each in names)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
