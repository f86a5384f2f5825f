"""Runs a program alone, or as workers of servers of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.launch import RunFailed, last_line
from benchmarks.lib.processes import server
from benchmarks.lib.results import Store, plain
from benchmarks.ported.program import Program
from benchmarks.ported.sources import lay_out

ROOT = Path(__file__).parents[2]
KINDS = {"plain": 0, "one": 1, "three": 3, "longer": 3}  # their numbers of workers; 0: the program as it was, without a server
NOISE = "noise"  # the program as it was, from parameters that one rounding has moved: how far rounding alone leads
SECONDS = 280.0  # after which a run has failed
_DIGITS = 9  # of a stored loss
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Run:
    """A run of a program.

    Attributes:
        kind: "plain": alone; "one": one worker; "three": three workers, with as many samples in all as one; "longer": three
            workers, each with as many batches as one; "noise": as `NOISE` says.
        seed: Of the program, and of the server.
    """

    kind: str
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What is kept of a run: its last quality, its wall-clock seconds, and its losses unless there are three workers."""

    quality: float
    seconds: float
    losses: list[float]

    def __str__(self) -> str:
        return f"quality {self.quality:g}"


def stored(folder: Path, name: str) -> Store[Run, Outcome]:
    return Store(folder / f"{name}.json", "run", Run, vars, lambda run, row: Outcome(**row))


@dataclass(frozen=True)
class Bench:
    """What the runs need: the folder of the repositories, one for what the programs write, and that of MNIST's files."""

    sources: Path
    work: Path
    data: Path | None


def make(program: Program, run: Run, bench: Bench) -> Outcome:
    """Makes a run. Raises RunFailed."""
    program.require_packages()
    if program.data and bench.data is None:
        raise RunFailed(f"{program.name} needs --data: the folder of MNIST's four files")
    workers, (arguments, options) = KINDS.get(run.kind, 0), program.settings(run.kind)
    folder = bench.work / program.name / f"{run.kind}-{run.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    options += f" --seed {run.seed}" + (f" --min-workers {workers}" if workers > 1 and program.together else "")
    with ExitStack() as running:
        serving = [
            running.enter_context(server("gem", None, *shlex.split(options))) for _ in range(program.servers if workers else 0)
        ]
        addresses = [address for address, _ in serving]
        scripts = [
            lay_out(program, bench.sources, folder / str(worker), bool(workers), addresses) for worker in range(max(1, workers))
        ]
        began = time.monotonic()
        printed = _printed(scripts, arguments, run, bench.data, folder)
        seconds = time.monotonic() - began
    losses = [plain(loss, _DIGITS) or 0.0 for loss in program.losses(printed)] if workers < 2 else []
    return Outcome(program.final_quality(printed), round(seconds, 1), losses)


def _printed(scripts: Sequence[Path], arguments: str, run: Run, data: Path | None, folder: Path) -> str:
    """Runs the scripts at once, each with a seed of its own. Returns what the first has printed."""
    processes, outputs = [], [folder / f"worker-{number}.txt" for number in range(len(scripts))]
    try:
        for number, script in enumerate(scripts):
            seed = run.seed + 1000 * number
            command = [sys.executable, script.name, *shlex.split(arguments.format(seed=seed, data=data))]
            environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")} | {
                "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg",
                "PORTED_SEED": str(seed), "PORTED_DATA": str(data or ""), "PORTED_NOISE": "1" if run.kind == NOISE else "",
            }  # fmt: skip
            with outputs[number].open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, cwd=script.parent, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                    )
                )
        deadline, running = time.monotonic() + SECONDS, True
        while running:
            running = any(process.poll() is None for process in processes)
            if failed := [output for process, output in zip(processes, outputs, strict=True) if process.poll()]:
                raise RunFailed(last_line(failed[0]))
            if time.monotonic() > deadline:
                raise RunFailed(f"not over after {SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outputs[0].read_text(encoding="utf-8", errors="replace")
