"""Milliseconds of a call, of the parts of a step, and of a server's passes; bytes of a process."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gem_client import Session


def synchronise() -> None:
    """Waits until the GPU, if there is one, has done all that is queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], repeats: int = 5, warm: int = 1) -> float:
    """The median time of a call, with what it queues on the GPU."""
    times = []
    for _ in range(warm + repeats):
        synchronise()
        began = time.perf_counter()
        work()
        synchronise()
        times.append(1e3 * (time.perf_counter() - began))
    return median(times[warm:])


class Parts:
    """The time of steps by part: that of the session's calls, and of what the optimizer does before and after them.

    Attributes:
        ms: The sums.
    """

    def __init__(self, session: Session) -> None:
        self.ms, self._last = defaultdict[str, float](float), 0.0
        for name in ("commit", "begin_commit", "finish_commit"):
            setattr(session, name, partial(self._timed, name, getattr(session, name)))

    def begin(self) -> None:
        """A step begins now."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the last part ended is this part."""
        now = time.perf_counter()
        self.ms[part] += 1e3 * (now - self._last)
        self._last = now

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.lap(f"before {name}")
        result = call(*arguments, **named)
        self.lap(name)
        return result


def passes(metrics: str) -> tuple[float, float]:
    """What the server with this address of metrics has done so far: its commits, and milliseconds of their passes."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as page:
        found = dict(re.findall(r"^gem_commit_apply_seconds_(\w+)(?:{.*})? (\S+)$", page.read().decode(), re.MULTILINE))
    return float(found.get("count", 0)), 1e3 * float(found.get("sum", 0))


def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes of a process: resident, shared, and pinned."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: 1024 * int(value) for name, value in re.findall(r"^(VmRSS|RssShmem|VmPin):\s+(\d+) kB", text, re.MULTILINE)}
