"""Measures how long a server takes to restart from a checkpoint and a log: `python -m benchmarks.server.recovery`."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_client import connect
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery
from gem_server.rules import RuleInput
from gem_server.rules.gem import Gem
from gem_server.rules.threads import Threads

from benchmarks.lib import machine
from benchmarks.lib.measuring import measurement
from benchmarks.lib.processes import server

LOG_BYTES = 1 << 30  # of gradients


def new_core(run_id: str, settings: Hyperparameters) -> Core:
    core = Core(run_id, settings, lease_seconds=60, memory_limit=0, new_id=lambda: os.urandom(16).hex())
    core.rule.use_threads(Threads(0))
    return core


def make_run(folder: Path, parameters: int, workers: int, log_bytes: int) -> tuple[int, bytes]:
    """Makes a checkpoint of version 0 and a log of float32 commits by alternating workers, and kills the server. Returns the
    last version and its θ."""
    random, version, theta = np.random.default_rng(0), 0, b""
    options = ["--durability=log", f"--checkpoint-dir={folder}"]
    with server("gem", None, *options, checkpoint_interval=0, log_limit=2 * log_bytes) as (address, pid):
        with ExitStack() as stack:
            sessions = [stack.enter_context(connect(address)) for _ in range(workers)]
            for session in sessions:
                session.join({"theta": random.standard_normal(parameters, np.float32)})
            while 4 * parameters * version < log_bytes:
                session = sessions[version % workers]
                random.standard_normal(out=session.gradient, dtype=np.float32)
                theta = session.commit(session.gradient).theta.tobytes()
                version += 1
        machine.kill([pid])
    return version, theta


def forget_pages(folder: Path) -> None:
    """Drops the files from the system's page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def timed(folder: Path) -> tuple[list[float], Core]:
    """Does what a server does before it serves, and returns the seconds of each step: check and read the checkpoint, read and
    apply the log, write a new checkpoint."""
    times = [time.perf_counter()]
    newest = checkpoint.newest(folder, lambda path, why: click.echo(f"{path}: {why}"))
    assert newest is not None
    path, state = newest
    core = new_core(state.run_id, state.hyperparameters)
    checkpoint.restore(path, state, core, 0.0)
    times.append(time.perf_counter())
    recovery.replay(folder, state, core, 0.0)
    times.append(time.perf_counter())
    captured = checkpoint.capture(core)
    captured.copy_theta()
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        checkpoint.write(Path(aside), captured, keep=1)
        times.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(times)], core


@measurement(parameters=25_000_000, workers=4, repeats=3, folder=Path("runs"))
def main(parameters: int, workers: int, repeats: int, folder: Path) -> None:
    """Makes a run's checkpoint and log, and rebuilds the run from them: first from the disk, then from the page cache."""
    ones = {name: np.ones(1, np.float32) for name in ("theta", "gradient", *Gem().buffers)}
    Gem().apply(Layout.of({"warm-up": (1,)}), ones.pop("theta"), ones.pop("gradient"), ones, RuleInput(0))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        run = Path(made)
        version, theta = make_run(run, parameters, workers, LOG_BYTES)
        (path,) = checkpoint.list_checkpoints(run)
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        click.echo(
            f"P = {parameters}, {workers} workers: checkpoint {nbytes / 2**20:.0f} MiB, log {version} commits, "
            f"{version * 4 * parameters / 2**20:.0f} MiB"
        )
        for files in ("cold", "warm"):
            for _ in range(repeats):
                if files == "cold":
                    forget_pages(run)
                (reading, replaying, writing), core = timed(run)
                assert core.central.version == version
                assert core.central.theta.tobytes() == theta
                click.echo(
                    f"{files} files: checkpoint {reading:.2f} s, replay {replaying:.2f} s "
                    f"({replaying / version * 1000:.0f} ms a commit), new checkpoint {writing:.2f} s"
                )


if __name__ == "__main__":
    main()
