"""Measures many sessions at once, with and without idle ones: `python -m benchmarks.server.sessions`."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import numpy as np
from gem_client import connect

from benchmarks.lib.load import Load, resident_bytes, split_evenly
from benchmarks.lib.measuring import heads, interleaved, measurement, medians, ratio, verdict
from benchmarks.lib.page import table
from benchmarks.lib.processes import measure, server
from benchmarks.lib.results import write_json

INTERVAL_SECONDS = 100.0  # time between two commits of an idle session
IDLE = 1000  # idle sessions beside the busy ones
BUSY = 16  # busy sessions: beside the idle ones, and as the reference for the rate of 100 sessions
MIN_RATIO, MIN_BESIDE_IDLE = 0.85, 0.95
_FIGURES = ("rate", "p50", "p99", "server_cpu", "server_bytes", "bytes_per_session")


@dataclass(frozen=True)
class Measured(Load):
    """The load of the busy sessions, beside `idle` others, on a server that held `empty` bytes without any."""

    idle: int
    empty: int

    @property
    def bytes_per_session(self) -> float:
        return (self.server_bytes - self.empty) / (len(self.times) + self.idle)

    def figures(self) -> dict[str, float]:
        mine = {"sessions": len(self.times), "idle": self.idle, "bytes_per_session": self.bytes_per_session}
        return {**mine, **super().figures()}


@measurement(
    parameters=156_450, transport=("shm", "tcp"), seconds=5.0, repeats=5, out=Path("runs/throughput/sessions.json"),
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Under a minute: one repeat of two seconds, no idle sessions.")
def main(parameters: int, transport: tuple[str, ...], seconds: float, repeats: int, quick: bool, out: Path) -> None:
    """Measures each number of sessions against a fresh server, without model compute; medians of the repeats."""
    idle = 0 if quick else IDLE
    if quick:
        seconds, repeats = 2.0, 1
    tables = []
    for way in transport:
        measure_one = partial(_measure, parameters, seconds, way == "shm")
        click.echo(f"\nP = {parameters:,}, rule gem, {way}; medians of {repeats} x {seconds:g} s")
        many = interleaved([(count, 0) for count in (4, BUSY, 100)], repeats, measure_one)
        beside = interleaved([(BUSY, 0), (BUSY, idle)] if idle else [], repeats, measure_one)
        _show(many)
        _compare(f"rate of 100 sessions against {BUSY}", MIN_RATIO, many, (100, 0), (BUSY, 0))
        _show(beside)
        _compare(f"rate of {BUSY} sessions beside {idle} idle ones", MIN_BESIDE_IDLE, beside, (BUSY, idle), (BUSY, 0))
        measurements = [each.figures() for kind in (*many.values(), *beside.values()) for each in kind]
        setting = {"parameters": parameters, "seconds": seconds, "repeats": repeats, "transport": way}
        tables.append({**setting, "measurements": measurements})
        write_json(out, tables)


Kinds = dict[tuple[int, int], list[Measured]]  # by busy and idle sessions


def _measure(parameters: int, seconds: float, shared: bool, kind: tuple[int, int]) -> Measured:
    sessions, idle = kind
    with server() as (address, pid):
        empty = resident_bytes(pid)
        with idle_sessions(address, parameters, idle, shared):
            return Measured(**vars(measure(address, parameters, sessions, seconds, shared, pid)), idle=idle, empty=empty)


@contextmanager
def idle_sessions(address: str, parameters: int, sessions: int, shared_memory: bool) -> Iterator[None]:
    """Holds sessions that have joined and made a commit, renew their leases, and commit rarely. They leave at the end."""
    context = mp.get_context("spawn")
    counts = split_evenly(sessions)
    joined, stop = context.Barrier(len(counts) + 1), context.Event()
    holders = [
        context.Process(target=_hold, args=(address, parameters, count, shared_memory, joined, stop)) for count in counts
    ]
    for holder in holders:
        holder.start()
    try:
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


def _show(measured: Kinds) -> None:
    rows = [
        (*kind, *medians(of, _FIGURES), f"{min(each.jain for each in of):.4f}") for kind, of in measured.items()
    ]  # fmt: skip
    click.echo(table(["sessions", "idle", *heads(_FIGURES), "lowest Jain's index"], rows))


def _compare(what: str, least: float, measured: Kinds, kind: tuple[int, int], base: tuple[int, int]) -> None:
    if kind in measured and base in measured and kind != base:
        click.echo(verdict(what, least, ratio(measured[kind], measured[base])))


if __name__ == "__main__":
    main()
