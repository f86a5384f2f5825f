"""Measures how long commits wait for a checkpoint, and for its backup: `python -m benchmarks.server.checkpoint_pause`.

The aim: one copy of θ."""

from __future__ import annotations

import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
from gem_client import Admin, connect

from benchmarks.lib.measuring import measurement
from benchmarks.lib.processes import server

CHECKPOINTS = 5
Times = list[tuple[float, float]]  # when the reply to a commit arrived, and how long the commit took


@measurement(parameters=25_000_000, workers=3, folder=Path("runs"))
def main(parameters: int, workers: int, folder: Path) -> None:
    """Prints the longest commit without a checkpoint, while one is written, and while its files are read for a backup."""
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
        written = [_checkpoint(address) for _ in range(CHECKPOINTS)]
        over.set()
        for thread in threads:
            thread.join()
    _show(parameters, [each for mine in times for each in mine], written)


def _checkpoint(address: str) -> tuple[float, float, float]:
    """Lets commits continue for a while, then writes a checkpoint and reads it. Returns when each began and when all ended."""
    time.sleep(4)
    began = time.monotonic()
    with Admin(address, timeout=300) as admin:
        path = admin.checkpoint().path
        written = time.monotonic()
        for _ in admin.read_checkpoint(path):
            pass
    return began, written, time.monotonic()


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


def _show(parameters: int, times: Times, checkpoints: list[tuple[float, float, float]]) -> None:
    phases = {
        "without one": [(0.0, checkpoints[0][0]), *((before[2], after[0]) for before, after in pairwise(checkpoints))],
        "while one is written": [(began, written) for began, written, _ in checkpoints],
        "while one is read": [(written, read) for _, written, read in checkpoints],
    }
    theta, copies = np.ones(parameters, np.float32), []
    for _ in range(5):
        began = time.monotonic()
        theta.copy()
        copies.append(time.monotonic() - began)
    writing, reading = (np.mean([each[at + 1] - each[at] for each in checkpoints]) for at in (0, 1))
    click.echo(
        f"P = {parameters:,}: {len(checkpoints)} checkpoints, {writing:.2f} s each on average, {reading:.2f} s to read one"
    )
    for what, spans in phases.items():
        of = [took for ended, took in times if any(begin <= ended <= end for begin, end in spans)]
        median, longest = 1e3 * np.median(of), 1e3 * max(of)
        click.echo(f"a commit {what:20s}  median {median:7.1f} ms   longest {longest:7.1f} ms   ({len(of)} commits)")
    click.echo(f"one copy of θ takes {1e3 * np.median(copies):.1f} ms")


if __name__ == "__main__":
    main()
