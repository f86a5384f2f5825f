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

from benchmarks.lib.measuring import interleaved, measurement, middle, ratio, spread, verdict
from benchmarks.lib.processes import Load, measure, resident_bytes, server, split_evenly
from benchmarks.lib.results import write_json

INTERVAL_SECONDS = 100.0  # time between two commits of an idle session
BUSY = 16  # busy sessions: beside the idle ones, and as the reference for the rate of 100 sessions
MIN_RATIO, MIN_JAIN, MIN_BESIDE_IDLE = 0.85, 0.98, 0.95
_HEAD = "sessions  commits/s  of first  lowest Jain's index   p50 ms   p99 ms  server CPU ms  server MiB  MiB a session"


@dataclass(frozen=True)
class Measured(Load):
    """The load of the busy sessions, beside `idle` others, on a server that held `empty` bytes without any."""

    idle: int
    empty: int

    @property
    def bytes_per_session(self) -> float:
        return (self.server_bytes - self.empty) / (len(self.commits) + self.idle)

    def figures(self) -> dict[str, float]:
        mine = {"sessions": len(self.commits), "idle": self.idle, "bytes_per_session": self.bytes_per_session}
        return {**mine, **super().figures()}


@measurement(
    parameters=156_450, transport=("shm", "tcp"), seconds=5.0, repeats=5, out=Path("runs/throughput/sessions.json"),
)  # fmt: skip
@click.option("--sessions", multiple=True, type=int, default=(4, BUSY, 100), help="Number of sessions at once.")
@click.option("--idle", type=int, default=1000, help=f"Number of idle sessions beside {BUSY} busy ones; 0: skip that.")
@click.option("--quick", is_flag=True, help="Under a minute: one repeat of two seconds, no idle sessions.")
def main(
    parameters: int, sessions: tuple[int, ...], idle: int, transport: tuple[str, ...], seconds: float, repeats: int,
    quick: bool, out: Path,
) -> None:  # fmt: skip
    """Measures each number of sessions against a fresh server, without model compute; medians of the repeats."""
    if quick:
        seconds, repeats, idle = 2.0, 1, 0
    tables = []
    for way in transport:
        measure_one = partial(_measure, parameters, seconds, way == "shm")
        click.echo(f"\nP = {parameters:,}, rule gem, {way}; medians of {repeats} x {seconds:g} s")
        many = interleaved([(count, 0) for count in sessions], repeats, measure_one)
        _show_many(many)
        kinds = [(BUSY, 0), (BUSY, idle)] if idle else []
        beside = interleaved(kinds, repeats, measure_one)
        if beside:
            _show_idle(beside[BUSY, idle], beside[BUSY, 0])
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


def _show_many(many: Kinds) -> None:
    click.echo(_HEAD)
    first, *_ = many.values()
    for (count, _), of in many.items():
        click.echo(
            f"{count:8d} {middle(of, 'rate'):10.1f} {ratio(of, first)[0]:9.2f} {min(each.jain for each in of):20.4f} "
            f"{1e3 * middle(of, 'p50'):8.1f} {1e3 * middle(of, 'p99'):8.1f} "
            f"{1e3 * middle(of, 'server_cpu'):14.2f} {middle(of, 'server_bytes') / 2**20:11.0f} "
            f"{middle(of, 'bytes_per_session') / 2**20:14.2f}"
        )
    jain = min(each.jain for of in many.values() for each in of)
    click.echo(verdict("lowest Jain's index", f"at least {MIN_JAIN}", f"{jain:.4f}", jain >= MIN_JAIN))
    if (100, 0) in many and (BUSY, 0) in many:
        _show_ratio(f"rate of 100 sessions against {BUSY}", MIN_RATIO, many[100, 0], many[BUSY, 0])


def _show_ratio(what: str, least: float, of: list[Measured], to: list[Measured]) -> None:
    found = ratio(of, to)
    click.echo(verdict(what, f"at least {least}", spread(found), found[0] >= least))


def _show_idle(beside: list[Measured], alone: list[Measured]) -> None:
    what = f"rate of {BUSY} sessions beside {beside[0].idle:,} idle ones against alone"
    _show_ratio(what, MIN_BESIDE_IDLE, beside, alone)
    cpu = [f"{1e3 * middle(of, 'server_cpu'):.2f}" for of in (beside, alone)]
    click.echo(f"processor time of the server for a commit: {cpu[0]} ms beside them, {cpu[1]} ms alone")
    each, all_ = (middle(beside, name) / 2**20 for name in ("bytes_per_session", "server_bytes"))
    click.echo(
        f"(an idle one commits every {INTERVAL_SECONDS:g} s; the server holds {each:.2f} MiB a session, {all_:.0f} in all)"
    )


if __name__ == "__main__":
    main()
