"""How settings change a run under AdamW: the measurements behind docs/tuning.md.

Each run is gem-train on MNIST, with a real server and real workers. Results are kept in docs/results/tuning/runs.json and are not
measured again; the page and the picture there are drawn from that file.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks.mnist import Mnist
from torch import nn

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/tuning"
RATES = ("3e-4", "1e-3", "3e-3", "1e-2", "3e-2")
WIDTHS = (16, 1, 30, 4)
CURVE_POINTS = 100
FINAL = 0.1  # share of a run, at its end, that the final loss is the mean of
DIVERGED = 3  # gem-train's exit status
Run = dict[str, Any]


class Perceptron(Mnist):
    """MNIST with a perceptron of one hidden layer, 102 thousand parameters: a gradient takes a millisecond."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10), nn.LogSoftmax(dim=1))


class OwnAdamW(Perceptron):
    """The same with an AdamW that each worker steps by itself."""

    rate = 1e-3

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate)


class OwnAdamWFaster(OwnAdamW):
    """The same at three times the rate."""

    rate = 3e-3


def plan() -> Iterator[str]:
    """The flags of every run, without those that all have."""
    shared, own = "--optimizer adamw", "--task benchmarks.tuning"
    yield from (f"{shared} --learning-rate {rate} --workers {workers}" for workers in WIDTHS for rate in RATES)
    yield from (f"{shared} --learning-rate 1e-3 --kappa {kappa} --workers 16" for kappa in ("0.1", "1", "4", "16"))
    yield from (f"{shared} --learning-rate {rate} --rule downpour --workers 16" for rate in RATES[:4])
    yield from (f"{own}:{task} --workers 16" for task in ("OwnAdamW", "OwnAdamWFaster"))
    yield f"{shared} --learning-rate 1e-3 --workers 30 --epochs 8"
    yield from (f"--learning-rate {rate} --workers 16" for rate in ("0.005", "0.05", "0.5"))
    yield from (f"{own}:{task} --local-steps 4 --workers 16" for task in ("OwnAdamW", "OwnAdamWFaster"))


def arguments(flags: str, data: Path, runs: Path) -> list[str]:
    """The command line of a run."""
    given = shlex.split(flags)
    workers = int(given[given.index("--workers") + 1])
    defaults = {
        "--task": "benchmarks.tuning:Perceptron", "--epochs": "2", "--processes": str(min(2, workers)), "--durability": "memory", "--evaluate-every": "600",
    }  # fmt: skip
    rest = [word for option, value in defaults.items() if option not in given for word in (option, value)]
    return [sys.executable, "-m", "gem_worker.launcher.cli", *given, *rest, "--data", str(data), "--runs", str(runs)]


def measure(flags: str, data: Path) -> Run:
    """Makes a run. Raises ClickException if it leaves no result."""
    with tempfile.TemporaryDirectory(prefix="gem-tuning-") as folder:
        done = subprocess.run(arguments(flags, data, Path(folder)), cwd=ROOT, capture_output=True, text=True)
        runs = list(Path(folder).iterdir())
        if done.returncode not in (0, DIVERGED) or not runs:
            raise click.ClickException(f"gem-train {flags} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return result(flags, RunFolder(runs[0]))


def result(flags: str, folder: RunFolder) -> Run:
    """What is kept of a run: its final figures, and curves of at most CURVE_POINTS points."""
    summary, history = json.loads(folder.summary.read_text()), folder.history()
    last = max(1, int(FINAL * len(history["loss"])))
    chunks = np.array_split(np.arange(len(history["loss"])), min(CURVE_POINTS, len(history["loss"])))
    curves = {name: [plain(history[name][chunk].mean()) for chunk in chunks] for name in ("version", "loss", "pi_median")}
    return {
        "flags": flags,
        "outcome": summary["outcome"],
        "workers": summary["workers"],
        "commits": summary["commits"],
        "test_accuracy": summary["test_accuracy"],
        "final_loss": plain(history["loss"][-last:].mean()),
        "staleness": plain(history["staleness"].mean()),
        "pi_median": plain(history["pi_median"].mean()),
        "pi_zero": plain(history["pi_zero_ratio"].mean()),
        "curves": curves,
    }


def plain(value: float) -> float | None:
    """Four digits of a number; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def load() -> dict[str, Run]:
    """The stored results by their flags."""
    file = RESULTS / "runs.json"
    return {run["flags"]: run for run in json.loads(file.read_text())} if file.exists() else {}


def save(runs: Iterable[Run]) -> None:
    """Writes the results, one a line."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
    (RESULTS / "runs.json").write_text(f"[\n{lines}\n]\n")


@click.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with MNIST's four files.")
def main(data: Path | None) -> None:
    """Makes the runs that have no result yet, if --data is given, then draws the page and the picture."""
    runs = load()
    for flags in plan():
        if flags not in runs and data is not None:
            runs[flags] = measure(flags, data.resolve())
            save(runs[each] for each in plan() if each in runs)
            click.echo(f"{runs[flags]['test_accuracy']} {runs[flags]['final_loss']} {runs[flags]['pi_median']}  {flags}")


if __name__ == "__main__":
    main()
