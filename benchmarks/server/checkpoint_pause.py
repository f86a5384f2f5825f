"""Measures how long commits wait for a checkpoint: `python -m benchmarks.server.checkpoint_pause`. The aim: one copy of θ."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import click
import numpy as np
from gem_client import Admin, connect

from benchmarks.lib.measuring import measurement
from benchmarks.lib.processes import server

Times = list[tuple[float, float]]  # when the reply to a commit arrived, and how long the commit took


@measurement(parameters=25_000_000, workers=3, folder=Path("runs"))
@click.option("--checkpoints", type=int, default=5, help="Number of checkpoints to write.")
def main(parameters: int, workers: int, checkpoints: int, folder: Path) -> None:
    """Prints the longest commit without a checkpoint, and the longest while one is written."""
    folder.mkdir(parents=True, exist_ok=True)
    times: list[Times] = [[] for _ in range(workers)]
    over, ready = threading.Event(), threading.Barrier(workers + 1)
    with (
        tempfile.TemporaryDirectory(prefix="pause-", dir=folder) as scratch,
        server("gem", None, f"--checkpoint-dir={scratch}/run", checkpoint_interval=0, checkpoint_keep=1) as (address, _),
    ):
        arguments = [(address, parameters, mine, ready, over) for mine in times]
        threads = [threading.Thread(target=_commits, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        ready.wait()
        written = [_checkpoint(address) for _ in range(checkpoints)]
        over.set()
        for thread in threads:
            thread.join()
    _show(parameters, [each for mine in times for each in mine], written)


def _checkpoint(address: str) -> tuple[float, float]:
    """Lets commits continue for a while, then writes a checkpoint. Returns when that began and ended."""
    time.sleep(4)
    began = time.monotonic()
    with Admin(address, timeout=300) as admin:
        admin.checkpoint()
    return began, time.monotonic()


def _commits(address: str, parameters: int, times: Times, ready: threading.Barrier, over: threading.Event) -> None:
    with connect(address) as session:
        session.join({"theta": np.zeros(parameters, np.float32)})
        session.gradient[:] = 1e-3
        for _ in range(3):
            session.commit(session.gradient)
        ready.wait()
        while not over.is_set():
            began = time.monotonic()
            session.commit(session.gradient)
            times.append((time.monotonic(), time.monotonic() - began))


def _show(parameters: int, times: Times, written: list[tuple[float, float]]) -> None:
    during = [took for ended, took in times if any(begin <= ended <= end + took for begin, end in written)]
    besides = [took for ended, took in times if not any(begin <= ended <= end + took for begin, end in written)]
    theta, copies = np.ones(parameters, np.float32), []
    for _ in range(5):
        began = time.monotonic()
        theta.copy()
        copies.append(time.monotonic() - began)
    seconds = np.mean([end - begin for begin, end in written])
    click.echo(f"P = {parameters:,}: {len(written)} checkpoints, {seconds:.2f} s each on average")
    for what, of in (("without one", besides), ("while one is written", during)):
        median, longest = 1e3 * np.median(of), 1e3 * max(of)
        click.echo(f"a commit {what:20s}  median {median:7.1f} ms   longest {longest:7.1f} ms   ({len(of)} commits)")
    click.echo(f"one copy of θ takes {1e3 * np.median(copies):.1f} ms")


if __name__ == "__main__":
    main()
