"""Measures the cost of each --durability, with commits of many workers: `python -m benchmarks.server.durability`.

The log is written where --folder is: its disk decides. It is measured as in the middle of a long run, when the files of
older parts of the log are written over; a disk may be much slower where it has to find new room first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import click
from gem_api.process.settings import DURABILITIES

from benchmarks.lib.load import Load
from benchmarks.lib.measuring import heads, interleaved, measurement, medians, ratio, spread, verdict
from benchmarks.lib.page import table
from benchmarks.lib.processes import measure, server
from benchmarks.lib.results import write_json

MAX_RATIO = 1.3  # time for a commit with a log, against memory
_FIGURES = ("rate", "p50", "p99", "server_cpu")

Loads = dict[tuple[str, str], list[Load]]  # by transport and mode


@measurement(
    parameters=156_450, workers=16, transport=("shm", "tcp"), seconds=5.0, repeats=5, folder=Path("runs"),
    out=Path("runs/durability.json"),
)  # fmt: skip
def main(
    parameters: int, workers: int, transport: tuple[str, ...], seconds: float, repeats: int, folder: Path, out: Path
) -> None:
    """Measures each mode against a fresh server, without model compute; medians of the repeats."""
    folder.mkdir(parents=True, exist_ok=True)
    size, sync = 4 * parameters, _sync_seconds(folder, 4 * parameters)
    click.echo(f"P = {parameters:,}, {workers} workers, medians of {repeats} x {seconds:g} s")
    click.echo(f"this disk: {1e3 * sync:.2f} ms to overwrite and sync {size:,} bytes")
    with tempfile.TemporaryDirectory(prefix="durability-", dir=folder) as scratch:
        loads = _all(parameters, workers, transport, seconds, repeats, Path(scratch))
    for way in transport:
        _show(way, {mode: loads[way, mode] for mode in DURABILITIES})
    costs = [{"transport": way, "mode": mode, **load.figures()} for (way, mode), of in loads.items() for load in of]
    write_json(out, {"parameters": parameters, "workers": workers, "sync_seconds": sync, "costs": costs})


def _all(parameters: int, workers: int, transport: tuple[str, ...], seconds: float, repeats: int, scratch: Path) -> Loads:
    click.echo("writing a first log, so that its files can be reused")
    for _ in range(2):
        _measure("log", transport[0], parameters, workers, 2 * seconds, scratch)
    kinds = [(way, mode) for way in transport for mode in DURABILITIES]
    return interleaved(kinds, repeats, lambda kind: _measure(kind[1], kind[0], parameters, workers, seconds, scratch))


def _measure(mode: str, way: str, parameters: int, workers: int, seconds: float, scratch: Path) -> Load:
    run = scratch / mode
    _begin_anew(run)
    options = [f"--durability={mode}", *([f"--checkpoint-dir={run}"] if mode != "memory" else [])]
    with server("gem", None, *options, log_limit="256M") as (address, pid):
        return measure(address, parameters, workers, seconds, way == "shm", pid)


def _begin_anew(run: Path) -> None:
    """Removes a finished run, except for the files of its log."""
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for segment in run.glob("log/segment-*"):
        segment.rename(segment.with_name(segment.name.replace("segment", "spare")))


def _show(way: str, of: dict[str, list[Load]]) -> None:
    rows = [[mode, *medians(loads, _FIGURES), spread(ratio(loads, of["memory"]))] for mode, loads in of.items()]
    click.echo("\n" + table([way, *heads(_FIGURES), "rate of memory's"], rows))
    click.echo(verdict("rate with a log", 1 / MAX_RATIO, ratio(of["log"], of["memory"])))


def _sync_seconds(folder: Path, size: int) -> float:
    """Median of the seconds that the disk takes to overwrite and sync `size` bytes."""
    path, data, times = folder / "sync-test", os.urandom(size), []
    with path.open("wb", buffering=0) as file:
        for _ in range(11):
            began = time.perf_counter()
            os.pwrite(file.fileno(), data, 0)
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    path.unlink()
    return median(times[1:])


if __name__ == "__main__":
    main()
