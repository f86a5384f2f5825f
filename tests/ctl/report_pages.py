"""Histories as a server writes them, and what a report shows, as a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gem_api import __version__
from gem_api.history import COLUMNS
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import shown

BEGIN = 1_700_000_000.0  # Unix seconds
_LOCAL = {
    "on": "local", "ray_address": "auto", "ray_labels": "", "ray_spread": False, "resources": "CPU=1", "working_dir": None,
}  # fmt: skip


def line(version: int, worker: str = "a", staleness: int = 0, discarded: int = 0, **changes: Any) -> str:
    """A line of a history; ten commits a second."""
    values = {"loss": 1 / version, "samples": 8, "pi_median": 0.5, "pi_zero_ratio": 0.25, "pi_max_ratio": 0.125}
    values |= {"proxy_energy": 1e-4, "central_energy": 2e-4, "unix_seconds": BEGIN + version / 10, **changes}
    name = f'"{worker.replace(chr(34), 2 * chr(34))}"' if set(worker) & set(',"') else worker
    known = {"version": version, "ticket": version, "worker": name, "sequence": 1, "discarded": discarded}
    return ",".join(str((known | {"staleness": staleness} | values)[column]) for column in COLUMNS)


def in_turn(commits: int, workers: int) -> list[str]:
    """The lines of workers of equal speed, which commit one after the other."""
    return [line(number, f"w-{(number - 1) % workers}", min(number, workers) - 1) for number in range(1, commits + 1)]


def history(path: Path, lines: list[str], end: str = "\r\n") -> Path:
    path.write_text("\r\n".join([",".join(COLUMNS), *lines]) + end, encoding="utf-8", newline="")
    return path


def complete_run(folder: Path) -> Path:
    """Makes the folder of a complete run of gem-train with 3 workers and 300 commits."""
    folder.mkdir(parents=True)
    history(folder / "commits.csv", in_turn(300, 3))
    scores = [{"version": 100, "loss": 0.5, "accuracy": 0.8}, {"version": 300, "loss": 0.25, "accuracy": 0.975}]
    summary = {
        "outcome": "complete",
        "run_id": "1a2b3c4d",
        "hyperparameters": {"learning_rate": 0.05, "batch_size": 16},
        "versions": {"gem-ps": "0.1.0"},
    }
    write_json(
        folder,
        run={"task": "digits", "workers": 3, "runs": "/secret", "learning_rate": 0.1, "server_settings": {}, **_LOCAL},
        evaluations=scores,
        summary=summary | {"commits_via": {"memory": 2, "tcp": 1}},
    )
    return folder


def write_json(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def shown_of(path: Path) -> dict[str, Any]:
    """What the report of a run that is over shows."""
    return shown(read_run(path, in_progress=False), BEGIN)


def as_text(path: Path) -> str:
    """The same, line by line; of a curve the number of its points, and the first and the last one."""
    report = shown_of(path)
    lines = [f"# Run {report['name']}", report["outcome"], *(f"! {note}" for note in report["notes"])]
    lines += [f"{name}: {value}" for name, value in report["facts"]]
    for name, column in report["curves"].items():
        known = [value for value in column if value is not None]
        lines += [f"[{name}: {len(known)} points, {known[0]:g} to {known[-1]:g}]"] if known else []
    lines += [" | ".join(row) for row in (report["columns"], *report["workers"]) if report["workers"]]
    for heading, rows in report["lists"].items():
        lines += [f"## {heading}", *(f"{name}: {value}" for name, value in rows)] if rows else []
    return "\n".join([*lines, report["written"].replace(f"gem-ps {__version__}.", "gem-ps VERSION.")]) + "\n"
