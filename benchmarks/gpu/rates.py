"""Section f: commits a second from 1, 4 and 16 workers, and the bandwidth of the memory that bounds them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from gem_worker.launcher.cluster import free_port

from benchmarks.gpu.checks import Checks, Found
from benchmarks.gpu.model import sizes
from benchmarks.gpu.timing import milliseconds, passes
from benchmarks.lib import machine
from benchmarks.lib.processes import measure, server

_ARRAYS, _ARRAYS_EACH = 8, 7  # of 4P bytes: on the server, and for each worker
_KINDS = (("memory", 1), ("memory", 4), ("memory", 16), ("TCP", 4))
_LARGE, _MANY_THREADS = 10_000_000, 16  # parameters from which the pass has several threads; usually eight at most


def run(checks: Checks) -> None:
    checks.check("f.bandwidth", _bandwidth, checks)
    for name, size in sizes(checks).items():
        count = size.parameters()
        for way, workers in _KINDS:
            checks.check(f"f.commits {name}, {way}, {workers} workers", _commits, count, way, workers, 0, checks.quick)
        if count > _LARGE:
            label = f"f.commits {name}, memory, 4 workers, {_MANY_THREADS} threads"
            checks.check(label, _commits, count, "memory", 4, _MANY_THREADS, checks.quick)


def _bandwidth(checks: Checks) -> Found:
    """GB/s read and written by a copy, by the number of threads."""
    count, usual = 10_000_000 if checks.quick else 250_000_000, torch.get_num_threads()
    source, target, rates = torch.ones(count), torch.zeros(count), {}
    for threads in sorted({1, min(8, usual), len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        rates[threads] = 8e-6 * count / milliseconds(partial(target.copy_, source), 3)
    torch.set_num_threads(usual)
    return {"GB_s": rates}


def _commits(count: int, way: str, workers: int, threads: int, quick: bool) -> Found:
    """From workers that compute nothing, and that nobody keeps in step."""
    needed = 4 * count * (_ARRAYS + workers * _ARRAYS_EACH)
    if needed > 0.8 * machine.available_bytes():
        return {"ok": None, "skipped": f"it needs {needed / 2**30:.0f} GiB"}
    options = ("--until-stopped", "--optimizer=adamw", f"--metrics-listen={(metrics := f'127.0.0.1:{free_port()}')}")
    settings: dict[str, Any] = {"apply_threads": threads, "smallest_share": 1.0, "reply_wait": 0.0}
    with server("gem", None, *options, **settings) as (address, pid):
        load = measure(address, count, workers, 0.5 if quick else 2.5, way == "memory", pid)
        done, spent = passes(metrics)
    return {
        "commits_s": load.rate, "median_ms": 1e3 * load.p50, "pass_ms": spent / done, "server_cpu_ms": 1e3 * load.server_cpu,
        "server_bytes": load.server_bytes,
    }  # fmt: skip
