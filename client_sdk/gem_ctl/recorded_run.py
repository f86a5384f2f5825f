"""A run as its files tell it: the folder of gem-train, or the history of gem-server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem_api.history import HistoryError, evaluations_beside
from gem_api.process.regular_file import MAX_BYTES, read_regular

from gem_ctl.recorded_commits import RecordedCommits, read_commits

COMMITS = "commits.csv"
_MAX_NUMBER = 1e100  # of an evaluation; a higher one comes from a damaged file


@dataclass
class RecordedRun:
    """A run as its files tell it.

    Attributes:
        name: The run's name; empty if the files do not tell.
        source: What the name leaves open: the run's id, or the name of the history's file.
        outcome: How it ended or that it is in progress; empty if the files do not tell.
        commits: Its commits.
        evaluations: Its evaluations on held-out data: version, loss and accuracy (0 to 1, or None).
        options: The launcher's options and the run's hyper-parameters.
        versions: The versions of the software.
        commits_via: How many workers' commits came which way, by transport: "memory", "tcp", "tls" or "grpc".
        notes: What the reader has to know first.
    """

    name: str
    source: str
    outcome: str
    commits: RecordedCommits
    evaluations: list[tuple[float, float, float | None]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commits_via: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(path: Path, *, in_progress: bool, commits: RecordedCommits | None = None) -> RecordedRun:
    """Reads the folder of a run, or a history file alone.

    Args:
        path: A folder of gem-train, or a file that `gem-server --history` writes, or the folder with that file.
        in_progress: Whether the run goes on, so that a summary from before it was resumed is out of date.
        commits: Its commits, if they have been read already.

    Raises:
        HistoryError: There is no history, or it is damaged throughout.
        OSError: The history can't be read.
    """
    history = history_file(path)
    commits = commits or read_commits(history)
    launched = any((history.parent / name).exists() for name in ("run.json", "summary.json"))
    run = RecordedRun(history.resolve().parent.name if launched else "", "" if launched else history.name, "", commits)
    if path.is_dir():
        _read_launcher_files(run, path, in_progress)
    launchers = history.parent / "evaluations.json"
    _read_evaluations(run, launchers if path.is_dir() and launchers.exists() else evaluations_beside(history))
    if commits.damaged:
        run.notes.append(f"{commits.damaged:,} damaged lines of {history.name} are left out.")
    if commits.nonfinite_losses:
        run.notes.append(f"The loss of {commits.nonfinite_losses:,} commits was NaN or infinite; the curves leave it out.")
    if commits.first is None:
        run.notes.append("No commit has been applied.")
    elif commits.first > 1:
        run.notes.append(f"The history begins at version {commits.first:,.0f}: earlier commits are not in the file.")
    return run


def history_file(path: Path) -> Path:
    """The history in a folder, or the file itself. Raises HistoryError if there is none, or if it is unclear which it is."""
    if path.is_file() or not path.exists():
        return path
    if (path / COMMITS).exists():
        return path / COMMITS
    files = sorted(path.glob("*.csv"))
    if len(files) == 1:
        return files[0]
    if (path / "run.json").exists():
        raise HistoryError(f"{path} has no {COMMITS} yet: its server has not started")
    several = f"several: {', '.join(one.name for one in files[:3])}; name one" if files else "none"
    raise HistoryError(f"{path} is not the folder of a run: it should hold {COMMITS}, or one other CSV file; it has {several}")


def _read_launcher_files(run: RecordedRun, folder: Path, in_progress: bool) -> None:
    """Reads what gem-train wrote beside the history. A file that is missing or damaged leaves its part of the page out."""
    options, summary = _read_json(run, folder / "run.json", dict), _read_json(run, folder / "summary.json", dict)
    hyperparameters = summary.get("hyperparameters")
    run.options = {**options, **(hyperparameters if isinstance(hyperparameters, dict) and not in_progress else {})}
    if summary.get("run_id") and not in_progress:
        run.source = f"id {summary['run_id']}"
    versions = summary.get("versions")
    run.versions = {name: str(text) for name, text in versions.items()} if isinstance(versions, dict) else {}
    if isinstance(via := summary.get("commits_via"), dict) and not in_progress:
        run.commits_via = {str(way): int(workers) for way, workers in via.items() if _is_number(workers)}
    if in_progress:
        run.outcome = "in progress"
    elif summary:
        run.outcome = str(summary.get("outcome"))
    elif options:
        run.outcome = "unknown: gem-train was killed, or runs on another machine"


def _read_evaluations(run: RecordedRun, path: Path) -> None:
    """Reads the evaluations that gem-train, or else the server, has kept."""
    scores = _read_json(run, path, list)
    known = [one for one in scores if isinstance(one, dict) and _is_number(one.get("version")) and _is_number(one.get("loss"))]
    run.evaluations = [
        (float(one["version"]), float(one["loss"]), float(one["accuracy"]) if _is_number(one.get("accuracy")) else None)
        for one in known
    ]


def _read_json(run: RecordedRun, path: Path, kind: type) -> Any:
    try:
        content = json.loads(read_regular(path, MAX_BYTES))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        run.notes.append(f"{path.name} can't be read: {error}")
        return kind()
    return content if isinstance(content, kind) else kind()


def _is_number(value: Any) -> bool:
    """Whether it is a number that a curve can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
