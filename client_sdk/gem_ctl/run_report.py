"""The report of a run: the page of the run with its data in it, from the folder of gem-train or the history of gem-server."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.history import HistoryError
from gem_api.process.message_json import finite
from gem_api.run_page import report_page

from gem_ctl import output
from gem_ctl.local_runs import find_runs
from gem_ctl.recorded_commits import RecordedCommits
from gem_ctl.recorded_run import RecordedRun, read_run
from gem_ctl.text import counts, duration

_MAX_ROWS = 100  # of the table of workers
_START_FIELDS = ("runs", "resume", "data")  # of run.json: they describe the machine, or one start of the run
_RAY = ("ray_address", "ray_labels", "ray_spread", "resources", "working_dir")  # settings of a run on Ray alone
_OUTCOMES = {
    "complete": "complete",
    "diverged": "diverged: a worker's loss was NaN or infinite",
    "stopped": "stopped: gem-train --resume continues it",
    "failed": "failed: a process kept dying; logs/ shows why",
}


def page(run: RecordedRun, now: float) -> str:
    """The report as HTML that needs no other file. `now` is in Unix seconds."""
    return report_page(shown(run, now))


def shown(run: RecordedRun, now: float) -> dict[str, Any]:
    """The report's values, as `present` in the page takes them."""
    batch_size = _batch_size(run)
    rows = _workers(run.commits, batch_size)
    brought = "batches" if batch_size else "samples"
    columns = ["worker", "commits", brought, f"of all {brought}", "mean staleness", "last at version"]
    return {
        "name": _name(run),
        "outcome": _outcome(run),
        "notes": run.notes,
        "facts": _facts(run),
        "curves": _curves(run),
        "columns": columns[:5] + ["discarded"] * bool(run.commits.discarded) + columns[5:],
        "workers": rows[:_MAX_ROWS],
        "more": f"and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else "",
        "lists": {"Settings": _listed(_settings(run)), "Versions": _listed(run.versions)},
        "written": f"Written {_clock(now)} UTC by gem-ps {__version__}.",
    }


def _curves(run: RecordedRun) -> dict[str, list[float | None]]:
    timeline = run.commits.timeline
    for version, loss, accuracy in sorted(run.evaluations, key=lambda one: one[0]):
        timeline.evaluated(version, loss, accuracy)
    curves = timeline.columns() or {"seconds": []}
    return {name: [finite(value, single=True) for value in column] for name, column in curves.items()}


def _listed(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), value or "–") for name, value in sorted(texts.items())]


def _clock(at: float) -> str:
    """Unix seconds as a date and time in UTC; a dash if no calendar has them."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "–"


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in re.split(r"(\d+)", name)]


def _name(run: RecordedRun) -> str:
    """The run's name; of a history alone, which has none, when it began."""
    begun = f"of {_clock(run.commits.begin)} UTC" if _has_times(run) else f"recorded in {run.source}"
    return run.name or begun


def _outcome(run: RecordedRun) -> str:
    parts, commits = [_OUTCOMES.get(run.outcome, run.outcome)], run.commits
    if _has_times(run):
        times = f"{_clock(commits.begin)} to {_clock(commits.end)} UTC, {duration(commits.end - commits.begin)}"
        parts += [run.source, times]
    return " · ".join(filter(None, parts))


def _has_times(run: RecordedRun) -> bool:
    return math.isfinite(run.commits.begin) and math.isfinite(run.commits.end)


def _settings(run: RecordedRun) -> dict[str, str]:
    left_out = _START_FIELDS if run.options.get("on") == "ray" else (*_START_FIELDS, *_RAY)
    return {name: _text(value) for name, value in run.options.items() if name not in left_out and _is_shown(value)}


def _is_shown(value: Any) -> bool:
    return value not in (None, "", {}, []) and value is not False


def _text(value: Any) -> str:
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    """The run's most important numbers."""
    commits, curves = run.commits, run.commits.timeline.columns()
    accuracies = [accuracy for _, _, accuracy in run.evaluations if accuracy is not None]
    figures = (
        ("Accuracy", 100 * accuracies[-1] if accuracies else None, "{:.2f} %"),
        ("Held-out loss", run.evaluations[-1][1] if run.evaluations else None, "{:.4f}"),
        ("Training loss", finite(curves["loss"][-1], single=False) if curves else None, "{:.4f}"),
        ("Commits", commits.final, "{:,.0f}"),
        ("Samples", commits.samples or None, "{:,.0f}"),
        ("Commits per second", _ratio(commits.applied, commits.timeline.seconds), "{:,.1f}"),
        ("Workers", len(commits.names), "{:,.0f}"),
        ("Commits via", counts(run.commits_via) or None, "{}"),
        ("Staleness", _staleness(commits), "{}"),
        ("Median π, mean", commits.mean("pi_median"), "{:.3f}"),
        ("Discarded", commits.discarded or None, "{:,.0f}"),
    )
    return [(name, template.format(value)) for name, value, template in figures if value is not None]


def _staleness(commits: RecordedCommits) -> str | None:
    """Its distribution in a few numbers."""
    if not commits.applied:
        return None
    mean, most = commits.per_worker.staleness.sum() / commits.applied, commits.distribution.nonzero()[0].max(initial=0)
    return f"mean {mean:.1f}, 95 % at most {commits.staleness_below(0.95):.0f}, highest {most:,}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _batch_size(run: RecordedRun) -> int:
    """Samples of a whole batch; 0 if the files do not tell, as a history alone."""
    size = run.options.get("batch_size")
    return size if isinstance(size, int) and size > 0 else 0


def _workers(commits: RecordedCommits, batch_size: int) -> list[tuple[str, ...]]:
    """A row for each worker. A slow one shows in the batches that it brought: with a share of a batch it makes about as many
    commits as the others."""
    totals, all_samples = commits.per_worker, commits.per_worker.samples.sum()
    rows = {
        name: (
            name,
            f"{totals.commits[number]:,.0f}",
            f"{totals.samples[number] / batch_size:,.1f}" if batch_size else f"{totals.samples[number]:,.0f}",
            f"{100 * totals.samples[number] / all_samples:.1f} %" if all_samples else "–",
            f"{totals.staleness[number] / totals.commits[number]:.1f}" if totals.commits[number] else "–",
            *([f"{totals.discarded[number]:,.0f}"] if commits.discarded else []),
            f"{totals.last[number]:,.0f}",
        )
        for number, name in enumerate(commits.names)
    }
    return [rows[name] for name in sorted(rows, key=_natural)]


def write_report(folder: Path, commits: RecordedCommits) -> Path:
    """Writes report.html of a run that has ended into its folder, and returns its path. `commits` are its own.

    Raises OSError."""
    out = folder / "report.html"
    output.write(out, page(read_run(folder, in_progress=False, commits=commits), time.time()).encode(errors="replace"))
    return out


def report_on(path: Path, out: Path | None) -> tuple[Path, str, str]:
    """The report of the run in this folder, or of this history file.

    Returns:
        The file to write, what the page shows in a few words, and the page as HTML.

    Raises:
        click.ClickException: There is no run, or its history can't be read.
    """
    try:
        run = read_run(path, in_progress=path.is_dir() and path in find_runs(path.parent))
    except HistoryError as error:
        raise click.ClickException(str(error)) from error
    except FileNotFoundError as error:
        raise click.ClickException(
            f"there is no folder or file {str(path)!r}: name a run's folder, or a file of gem-server --history; a report's own "
            "name ends in .html"
        ) from error
    except OSError as error:
        raise click.ClickException(f"can't read {error.filename or path}: {error.strerror}") from error
    outcome = f", {run.outcome}" if run.outcome else ""
    named = path / "report.html" if path.is_dir() else Path(f"gem-{re.sub(r'[^A-Za-z0-9_.-]', '_', path.stem)}.html")
    return out or named, f"run {_name(run)}{outcome}, version {run.commits.final:.0f}", page(run, time.time())


def is_page(path: Path) -> bool:
    """Whether a report can be written there: a name that ends in .html, "-", or a device."""
    special = path.exists() and not path.is_file() and not path.is_dir()
    return path.suffix.lower() in (".html", ".htm") or str(path) == "-" or special
