"""Sessions that are mostly idle: each renews its lease and commits rarely."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

import numpy as np
from gem_client import connect

from benchmarks.lib.processes import split_evenly

INTERVAL_SECONDS = 100.0  # time between two commits of one session


@contextmanager
def idle_sessions(address: str, parameters: int, sessions: int, shared_memory: bool) -> Iterator[None]:
    """Holds `sessions` sessions, all of which have joined and made a commit. They leave at the end."""
    context = mp.get_context("spawn")
    counts = split_evenly(sessions)
    joined, stop = context.Barrier(len(counts) + 1), context.Event()
    holders = [
        context.Process(target=_hold, args=(address, parameters, count, shared_memory, joined, stop)) for count in counts
    ]
    for holder in holders:
        holder.start()
    try:
        if holders:
            joined.wait()
        yield
    finally:
        stop.set()
        for holder in holders:
            holder.join(60)
            holder.kill()


def _hold(address: str, parameters: int, sessions: int, shared_memory: bool, joined: Any, stop: Any) -> None:
    gradient, theta = np.full(parameters, 1e-3, np.float32), {"theta": np.zeros(parameters, np.float32)}
    with ExitStack() as stack:
        names = (f"idle-{os.getpid()}-{number}" for number in range(sessions))
        held = [stack.enter_context(connect(address, name=name, shared_memory=shared_memory)) for name in names]
        for session in held:
            session.join(theta)
            session.commit(gradient)
        joined.wait()
        for session in cycle(held):
            if stop.wait(INTERVAL_SECONDS / sessions):
                return
            session.commit(gradient)
