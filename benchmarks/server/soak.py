"""Looks for leaks in the server, with many small commits from workers that join, leave and are killed:
`python -m benchmarks.server.soak`.

Starts a real gem-server that logs every commit and samples its resident memory, open file descriptors and threads. Then fits a
line to each, over what was sampled after a warm-up.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from gem_api.errors import GemError
from gem_client import Admin, connect
from gem_worker.launcher.cluster import free_port
from matplotlib.figure import Figure

from benchmarks.lib.measuring import measurement
from benchmarks.lib.page import table
from benchmarks.lib.processes import server
from benchmarks.lib.results import write_json
from benchmarks.lib.style import PALE, RED, legend, panels, save, styled

COMMITS = 1_000_000
PROCESSES, SESSIONS = 3, 3  # worker processes, and sessions in each
MAX_COMMITS = 600  # commits of one session before it leaves and returns under the same name
KILL_SECONDS = 10.0
WARM_UP = 0.2  # of the samples
SAMPLES = 1_000_000
# A line that rises by at most this over the measured part counts as flat: bounded things may still fill up meanwhile, such as
# the reasons why the last 10,000 leases ended, and the pool of threads that write files.
TOLERANCE = {"resident MiB": 10.0, "descriptors": 5.0, "threads": 3.0}


@dataclass
class Course:
    """What was sampled: one entry for each moment."""

    commits: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)  # opened and ended so far
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TOLERANCE})


@dataclass(frozen=True)
class Line:
    """A line fitted to one quantity after the warm-up: where it begins, and by how much it rises in 100,000 commits."""

    name: str
    begin: float
    slope: float
    error: float
    rise: float

    @property
    def flat(self) -> bool:
        return self.rise <= TOLERANCE[self.name]


@measurement(parameters=1000, out=Path("runs/soak"))
@click.option("--minutes", type=float, default=60.0, help=f"Stop after this time, if it comes before {COMMITS:,} commits.")
def main(minutes: float, parameters: int, out: Path) -> None:
    """Exits with status 1 if any measured quantity grows."""
    options = [f"--metrics-listen=127.0.0.1:{free_port()}", "--durability=log", "--batch-size=16"]
    options += ["--epochs=0", "--steps=1000000000"]  # without an end
    with (
        tempfile.TemporaryDirectory() as folder,
        server("gem", None, f"--checkpoint-dir={folder}", *options, checkpoint_interval=20, lease_seconds=3) as (address, pid),
        churn(address, parameters),
    ):
        course = watched(address, pid, minutes * 60)
    lines = [fitted(course, name) for name in TOLERANCE]
    click.echo(report(course, lines))
    result = {"durability": "log", "parameters": parameters, "lines": [asdict(line) for line in lines], **asdict(course)}
    write_json(out / "soak-log.json", result, indent=None)
    save(draw(course, lines), out / "soak-log.png")
    if not all(line.flat for line in lines):
        sys.exit(1)


@contextmanager
def churn(address: str, parameters: int) -> Iterator[None]:
    """Runs worker processes until the block ends. From time to time one is killed and replaced."""
    context, stop = mp.get_context("spawn"), threading.Event()
    dice = random.Random(0)

    def start(number: int) -> Any:
        process = context.Process(target=work, args=(address, parameters, number, dice.random()), daemon=True)
        process.start()
        return process

    processes = [start(number) for number in range(PROCESSES)]

    def replace() -> None:
        while not stop.wait(KILL_SECONDS):
            number = dice.randrange(PROCESSES)
            processes[number].kill()
            processes[number].join()
            processes[number] = start(number)

    killer = threading.Thread(target=replace)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()
        for process in processes:
            process.kill()
            process.join()


def work(address: str, parameters: int, number: int, seed: float) -> None:
    """The sessions of one process, each with a fixed name. Some share memory, the others send their tensors."""
    threads = [
        threading.Thread(target=come_and_go, args=(address, parameters, f"worker-{number}-{each}", each % 2 == 0, seed + each))
        for each in range(SESSIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def come_and_go(address: str, parameters: int, name: str, shares: bool, seed: float) -> None:
    dice, gradient = random.Random(seed), np.full(parameters, 1e-3, np.float32)
    while True:
        with suppress(GemError), connect(address, name=name, shared_memory=shares) as session:
            session.join({"theta": np.zeros(parameters, np.float32)})
            batches = iter(session.shards(SAMPLES))
            for _ in range(dice.randrange(1, MAX_COMMITS)):
                next(batches)
                session.commit(gradient, loss=1.0)


def watched(address: str, pid: int, seconds: float) -> Course:
    """Samples until the number of commits is reached, or the time is up."""
    course, began = Course(), time.monotonic()
    pause = min(5.0, seconds / 200)
    with Admin(address) as admin:
        while not course.commits or (course.commits[-1] < COMMITS and time.monotonic() - began < seconds):
            time.sleep(pause)
            status = admin.status()
            course.commits.append(status.version)
            course.seconds.append(time.monotonic() - began)
            course.leases.append(sum(status.leases_ended.values()) + len(status.workers))
            for name, value in held(pid).items():
                course.values[name].append(value)
            if len(course.commits) % 20 == 0:
                click.echo(f"{course.seconds[-1]:6.0f} s  {status.version:9,d} commits  {held(pid)}", err=True)
    return course


def held(pid: int) -> dict[str, float]:
    """The memory, files and threads that a process holds now (Linux)."""
    words = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    status = {each[0]: each[1] for each in words if each[0] in ("VmRSS:", "Threads:")}
    return {
        "resident MiB": int(status["VmRSS:"]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads:"]),
    }


def fitted(course: Course, name: str) -> Line:
    """Fits a line, by least squares, to the samples after the warm-up."""
    first = int(WARM_UP * len(course.commits))
    x, y = np.array(course.commits[first:], float) / 1e5, np.array(course.values[name][first:])
    (slope, begin), covariance = np.polyfit(x - x[0], y, 1, cov=True)
    return Line(name, float(begin), float(slope), float(np.sqrt(covariance[0, 0])), float(slope * (x[-1] - x[0])))


def report(course: Course, lines: list[Line]) -> str:
    """The verdict as a table."""
    head = f"{course.commits[-1]:,} commits in {course.seconds[-1]:,.0f} s, {course.leases[-1]:,} leases"
    rows = [
        (line.name, f"{line.begin:.1f}", f"{line.slope:+.3f} ± {line.error:.3f}", f"{line.rise:+.2f}",
         "flat" if line.flat else "GROWS")
        for line in lines
    ]  # fmt: skip
    return table([head, f"after the first {WARM_UP:.0%}", "in 100,000 commits", "rise in all", ""], rows)


@styled
def draw(course: Course, lines: list[Line]) -> Figure:
    title = f"What gem-server holds over {course.commits[-1]:,} commits of workers that come, leave and are killed"
    figure, places = panels(len(lines), 1, title, 1.5, sharex=True)
    first = int(WARM_UP * len(course.commits))
    ends = np.array([course.commits[first], course.commits[-1]], float)
    for axes, line in zip(places, lines, strict=True):
        axes.plot(course.commits, course.values[line.name], color=PALE, label="sampled")
        axes.plot(ends, line.begin + line.slope * (ends - ends[0]) / 1e5, color=RED, label="fitted")
        axes.set(title=f"{line.name}: {line.slope:+.2f} in 100,000 commits".replace("-", "−"), ylabel=line.name)
        axes.set_ylim(0, 1.2 * max(course.values[line.name]))
    places[-1].set_xlabel("commits applied")
    places[-1].xaxis.set_major_formatter("{x:,.0f}")
    legend(figure)
    return figure


if __name__ == "__main__":
    main()
