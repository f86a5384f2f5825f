"""Servers of this project under measurement, and sessions that commit to them as fast as they can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gem_api.process.options import as_environment
from gem_client import Admin, Retry, connect
from gem_worker.launcher.cluster import free_port

from benchmarks.lib import load
from benchmarks.lib.load import Load, RoundTrip, split_evenly


@contextmanager
def server(
    rule: str = "gem", port: int | None = None, *options: str, host: str = "127.0.0.1", tls_ca: Path | None = None,
    **settings: Any,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Runs a server process with the given options, on a free port if none is given. Yields its address and process id.

    Args:
        host: The address of this machine that it listens on.
        tls_ca: The authority of its certificate, if the options give it one.
        settings: Settings that have no option.
    """
    address = f"{host}:{port or free_port()}"
    command = [sys.executable, "-m", "gem_server", f"--listen={address}", "--metrics-listen=", f"--rule={rule}", *options]
    environment = os.environ | as_environment({"lane_listen": f"{host}:0", "memory_limit": 0} | settings)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        with Admin(address, tls_ca=tls_ca) as admin:
            Retry(give_up_after=60).call(admin.status)
        yield address, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(
    address: str, parameters: int, sessions: int, seconds: float, shared_memory: bool = True, *server_pids: int,
    enter: Callable[[], None] | None = None, **connecting: Any,
) -> Load:  # fmt: skip
    """Commits from `sessions` sessions at once, in four processes; see `benchmarks.lib.load`.

    Args:
        enter: Called first in each client process, to move it elsewhere.
        connecting: More arguments of `gem_client.connect`.
    """
    worker = partial(_session, address, parameters, shared_memory=shared_memory, **connecting)
    return load.measure(worker, split_evenly(sessions), seconds, server_pids, enter)


@contextmanager
def _session(address: str, parameters: int, number: int, **connecting: Any) -> Iterator[RoundTrip]:
    gradient = np.full(parameters, 1e-3, np.float32)
    with connect(address, **connecting) as session:
        session.join({"theta": np.zeros(parameters, np.float32)})
        session.commit(gradient)
        yield lambda: session.commit(gradient)
