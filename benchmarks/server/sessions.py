"""Measures many sessions at once, with and without idle ones: `python -m benchmarks.server.sessions`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np

from benchmarks.lib.measuring import interleaved, measurement, middle, ratio, spread, verdict
from benchmarks.lib.processes import measure, resident_bytes, server
from benchmarks.lib.results import write_json
from benchmarks.server.idle import INTERVAL_SECONDS, idle_sessions

BUSY = 16  # busy sessions: beside the idle ones, and as the reference for the rate of 100 sessions
MIN_RATIO, MIN_JAIN, MIN_BESIDE_IDLE = 0.85, 0.98, 0.95
_HEAD = "sessions  commits/s  of first  lowest Jain's index   p50 ms   p99 ms  server CPU ms  server MiB  MiB a session"


@dataclass(frozen=True)
class Measured:
    """One measurement: commits per second of the busy sessions, seconds of a commit and of the server's processor in one,
    bytes that the server holds."""

    sessions: int
    idle: int
    rate: float
    jain: float
    p50: float
    p99: float
    server_cpu: float
    server_bytes: int
    bytes_per_session: float


@dataclass(frozen=True)
class Setting:
    """The settings that all measurements of a table share."""

    parameters: int
    seconds: float
    repeats: int
    transport: str


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
        setting = Setting(parameters, seconds, repeats, way)
        click.echo(f"\nP = {parameters:,}, rule gem, {way}; medians of {repeats} x {seconds:g} s")
        many = interleaved([(count, 0) for count in sessions], repeats, partial(_measure, setting))
        _show_many(many)
        kinds = [(BUSY, 0), (BUSY, idle)] if idle else []
        beside = interleaved(kinds, repeats, partial(_measure, setting))
        if beside:
            _show_idle(beside[BUSY, idle], beside[BUSY, 0])
        measurements = [asdict(each) for kind in (*many.values(), *beside.values()) for each in kind]
        tables.append({**asdict(setting), "measurements": measurements})
        write_json(out, tables)


Kinds = dict[tuple[int, int], list[Measured]]


def _measure(setting: Setting, kind: tuple[int, int]) -> Measured:
    sessions, idle = kind
    shared = setting.transport == "shm"
    with server() as (address, pid):
        empty = resident_bytes(pid)
        with idle_sessions(address, setting.parameters, idle, shared):
            load = measure(address, setting.parameters, sessions, setting.seconds, shared, pid)
    p50, p99 = np.percentile(load.latencies, [50, 99])
    each = (load.server_bytes - empty) / (sessions + idle)
    cpu = load.server_cpu / sum(load.commits)
    return Measured(sessions, idle, load.rate, load.jain, float(p50), float(p99), cpu, load.server_bytes, each)


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
