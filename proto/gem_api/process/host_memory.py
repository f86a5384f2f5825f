"""How much memory the process may use: the container's limit, or the machine's memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_DEFAULT_SHARE = 0.8


def default_limit() -> int:
    """Four fifths of the container's or the machine's memory, in bytes; 0 if that is unknown."""
    limits = [limit for path in _CGROUP_LIMITS if (limit := _read(path))]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(_DEFAULT_SHARE * min(limits, default=0))


def _read(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
