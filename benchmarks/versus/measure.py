"""Makes one run, in a process of its own, and keeps the results of all in one JSON file, a line for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.launch import RunFailed
from benchmarks.lib.results import Store
from benchmarks.versus.outcome import Outcome, Run
from benchmarks.versus.plan import Case
from benchmarks.versus.profiles import KINDS
from benchmarks.versus.setup import OUTCOME, Setup

UNIT_SECONDS = 0.25
LIMIT_UNITS = 400.0  # after which a run ends
_ROOT = Path(__file__).parents[2]
_MEMORY = Path("/dev/shm")
_PACKAGES = ("torch", "numpy", "numba", "grpcio")  # whose versions the results name
_KEPT_OUTPUT = Path("runs/versus-failed")  # what the processes of a failed run have printed


def measure(run: Run, data: Path | None) -> Outcome:
    """Trains until the lower loss is reached, or the limit is. Raises RunFailed."""
    return Outcome.of(raced(run, data, LIMIT_UNITS))


def measure_exchange(run: Run, data: Path | None) -> float:
    """The mean milliseconds of an exchange alone; rate, profile and seed mean nothing. Raises RunFailed."""
    return float(raced(run, data, 1.0, exchange_only=True))


def raced(run: Run, data: Path | None, limit: float, **more: Any) -> Any:
    """What a race leaves; `more` are further settings of it. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="versus-", dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        files = str(data.resolve()) if data else None
        unit = UNIT_SECONDS * KINDS[run.profile].unit
        Setup(**asdict(run), unit=unit, limit=limit, data=files, folder=name, **more).save()
        command = [sys.executable, "-m", "benchmarks.versus.race", name]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GEM_")}
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip
        try:
            _, said = process.communicate()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            shutil.copytree(name, _KEPT_OUTPUT, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.pt", "*.npz"))
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            raise RunFailed(f"{last} (what its processes printed is in {_KEPT_OUTPUT})")
        return json.loads((Path(name) / OUTCOME).read_text())


def stored(path: Path) -> Store[Run, Outcome]:
    """The stored results; their head names unit, limit, machine and versions. Raises DamagedError."""
    conditions = {**machine.description(), **{name: metadata.version(name) for name in _PACKAGES}}
    head = {"format": 1, "unit": UNIT_SECONDS, "limit": LIMIT_UNITS, "conditions": conditions}
    return Store(path, "run", Run, vars, lambda run, row: Outcome.of(row), head)


def exchanges(out: Path) -> Store[Case, float]:
    """The milliseconds of an exchange by contender, model and number of workers. Raises DamagedError."""
    path = out / "overhead.json"
    return Store(path, "case", Case, lambda value: {"ms": round(value, 3)}, lambda case, row: float(row["ms"]))
