"""Measures many sessions at once, with and without idle ones: `python -m benchmarks.server.sessions`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
from gem_api.process.lifetime import interruptible

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


@click.command(context_settings={"show_default": True})
@click.option("--parameters", type=int, default=156_450, help="P, the size of the model.")
@click.option("--sessions", multiple=True, type=int, default=(4, BUSY, 100), help="Number of sessions at once.")
@click.option("--idle", type=int, default=1000, help=f"Number of idle sessions beside {BUSY} busy ones; 0: skip that.")
@click.option(
    "--transport", multiple=True, type=click.Choice(("shm", "tcp")), default=("shm", "tcp"), help="How tensors travel."
)
@click.option("--seconds", type=float, default=5.0, help="Length of each measurement.")
@click.option("--repeats", type=int, default=5, help="Measurements of each number of sessions, interleaved.")
@click.option("--quick", is_flag=True, help="Under a minute: one repeat of two seconds, no idle sessions.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/throughput/sessions.json"), help="File for the figures."
)
@interruptible()
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
        many = _interleaved(setting, [(count, 0) for count in sessions])
        _show_many(many)
        beside = _interleaved(setting, [(BUSY, 0), (BUSY, idle)]) if idle else {}
        if beside:
            _show_idle(beside[BUSY, idle], beside[BUSY, 0])
        measurements = [asdict(each) for kind in (*many.values(), *beside.values()) for each in kind]
        tables.append({**asdict(setting), "measurements": measurements})
        write_json(out, tables)


Kinds = dict[tuple[int, int], list[Measured]]


def _interleaved(setting: Setting, kinds: list[tuple[int, int]]) -> Kinds:
    """Measures every kind (busy sessions, idle sessions) once in each repeat; every second repeat in reverse order."""
    measured: Kinds = {kind: [] for kind in kinds}
    for repeat in range(setting.repeats):
        for kind in kinds if repeat % 2 == 0 else reversed(kinds):
            measured[kind].append(_measure(setting, *kind))
    return measured


def _measure(setting: Setting, sessions: int, idle: int) -> Measured:
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
            f"{count:8d} {_middle(of, 'rate'):10.1f} {_ratio(of, first)[0]:9.2f} {min(each.jain for each in of):20.4f} "
            f"{1e3 * _middle(of, 'p50'):8.1f} {1e3 * _middle(of, 'p99'):8.1f} "
            f"{1e3 * _middle(of, 'server_cpu'):14.2f} {_middle(of, 'server_bytes') / 2**20:11.0f} "
            f"{_middle(of, 'bytes_per_session') / 2**20:14.2f}"
        )
    jain = min(each.jain for of in many.values() for each in of)
    click.echo(_verdict("lowest Jain's index", MIN_JAIN, jain, f"{jain:.4f}"))
    if (100, 0) in many and (BUSY, 0) in many:
        ratio, low, high = _ratio(many[100, 0], many[BUSY, 0])
        click.echo(_verdict(f"rate of 100 sessions against {BUSY}", MIN_RATIO, ratio, f"{ratio:.2f} ({low:.2f}..{high:.2f})"))


def _show_idle(beside: list[Measured], alone: list[Measured]) -> None:
    ratio, low, high = _ratio(beside, alone)
    what = f"rate of {BUSY} sessions beside {beside[0].idle:,} idle ones against alone"
    click.echo(_verdict(what, MIN_BESIDE_IDLE, ratio, f"{ratio:.2f} ({low:.2f}..{high:.2f})"))
    cpu = [f"{1e3 * _middle(of, 'server_cpu'):.2f}" for of in (beside, alone)]
    click.echo(f"processor time of the server for a commit: {cpu[0]} ms beside them, {cpu[1]} ms alone")
    each, all_ = (_middle(beside, name) / 2**20 for name in ("bytes_per_session", "server_bytes"))
    click.echo(
        f"(an idle one commits every {INTERVAL_SECONDS:g} s; the server holds {each:.2f} MiB a session, {all_:.0f} in all)"
    )


def _middle(of: list[Measured], name: str) -> float:
    return float(median(getattr(each, name) for each in of))


def _ratio(of: list[Measured], to: list[Measured]) -> tuple[float, float, float]:
    """Median, lowest and highest ratio of the rates, one for each repeat."""
    ratios = [one.rate / other.rate for one, other in zip(of, to, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def _verdict(what: str, target: float, measured: float, text: str) -> str:
    return f"{what}: at least {target}, measured {text}: {'met' if measured >= target else 'NOT met'}"


if __name__ == "__main__":
    main()
