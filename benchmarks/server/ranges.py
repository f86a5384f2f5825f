"""Measures memory per server and commits/s of 1, 2 and 4 servers that hold θ together: `python -m benchmarks.server.ranges`.

All servers and workers share this machine. So what is measured is the memory of each server, the processor time that a commit
costs each server, and the commits/s of all of them on these cores. What is calculated are the commits/s of servers on a machine
each: from that processor time, and by `gem-ctl plan`. The workers compute nothing, so that the servers are busy all the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import click
from gem_ctl.planning.plan import Setup, plan
from gem_worker.launcher.cluster import free_port

from benchmarks.lib import machine
from benchmarks.lib.load import Load
from benchmarks.lib.measuring import interleaved, measurement, middle, ratio
from benchmarks.lib.page import table
from benchmarks.lib.processes import measure, server
from benchmarks.lib.results import write_json

SERVERS = (1, 2, 4)
Loads = dict[int, list[Load]]  # by N


@measurement(
    parameters=25_000_000, workers=4, transport="tcp", seconds=20.0, repeats=3, folder=Path("runs"),
    out=Path("runs/ranges.json"),
)  # fmt: skip
def main(parameters: int, workers: int, transport: str, seconds: float, repeats: int, folder: Path, out: Path) -> None:
    """Measures each number of servers against fresh server processes; medians of the repeats."""
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"P = {parameters:,}, {workers} workers, {transport}, medians of {repeats} x {seconds:g} s")

    def measure_one(count: int) -> Load:
        load = _measure(count, parameters, workers, transport == "shm", seconds, folder)
        click.echo(f"  N = {count}: {load.figures()}", err=True)
        return load

    loads = interleaved(SERVERS, repeats, measure_one)
    _show(loads, Setup(parameters, workers, compute_seconds=0.0, shared_memory=transport == "shm", durability="log"))
    figures = {"machine": machine.description(), "parameters": parameters, "workers": workers, "transport": transport}
    write_json(out, {**figures, "costs": [{"servers": count, **load.figures()} for count, of in loads.items() for load in of]})


def _measure(count: int, parameters: int, workers: int, shared: bool, seconds: float, folder: Path) -> Load:
    with (
        tempfile.TemporaryDirectory(prefix="ranges-", dir=folder) as scratch,
        _running(count, Path(scratch)) as (address, pids),
    ):
        return measure(address, parameters, workers, seconds, shared, *pids)


@contextmanager
def _running(count: int, scratch: Path) -> Iterator[tuple[str, list[int]]]:
    """Runs N servers. Yields the address of that of range 0, and the ids of all processes."""
    ports = [free_port() for _ in range(count)]
    peers = ",".join(f"127.0.0.1:{port}" for port in ports[1:])
    with ExitStack() as stack:
        started = {}
        for index in [*range(1, count), 0]:
            own = ["--durability=log", f"--checkpoint-dir={scratch / str(index)}"]
            own += [f"--range={index}/{count}"] if count > 1 else []
            own += [f"--peers={peers}"] if count > 1 and index == 0 else []
            started[index] = stack.enter_context(server("gem", ports[index], *own, checkpoint_interval=0, log_limit="4G"))
        yield started[0][0], [started[index][1] for index in range(count)]


def _show(loads: Loads, setup: Setup) -> None:
    plans = {count: plan(replace(setup, servers=count)) for count in SERVERS}
    first, measured, calculated = SERVERS[0], [], []
    for count in SERVERS:
        of, planned, base = loads[count], plans[count], plans[first]
        memory, busy, rate = (middle(of, name) for name in ("server_bytes", "server_cpu", "rate"))
        times = [ratio(of, loads[first], name)[0] for name in ("server_bytes", "server_cpu", "rate")]
        measured.append([
            count, f"{memory / 2**20:.0f} MiB ({times[0]:.2f})",
            f"{planned.server_bytes / 2**20:.0f} MiB ({planned.server_bytes / base.server_bytes:.2f})",
            f"{1e3 * busy:.1f} ms ({times[1]:.2f})",
            f"{1e3 * planned.server_seconds:.1f} ms ({planned.server_seconds / base.server_seconds:.2f})",
            f"{rate:.2f} ({times[2]:.2f})",
        ])  # fmt: skip
        alone, rise = planned.commits_per_second, planned.commits_per_second / base.commits_per_second
        calculated.append([count, f"{1 / busy:.2f}/s ({1 / times[1]:.2f})", f"{alone:.2f}/s ({rise:.2f})"])
    cores = machine.description()["cores"]
    click.echo(f"\nMeasured, all servers and workers on the same {cores} cores (in brackets: ratio to N = {first})\n")
    click.echo(table(["N", "Memory a server", "gem-ctl plan", "Processor a commit", "gem-ctl plan", "Commits/s"], measured))
    click.echo("\nCalculated for a machine for each server (nothing of this was run)\n")
    click.echo(table(["N", "1 / processor time", "gem-ctl plan"], calculated))


if __name__ == "__main__":
    main()
