"""What `gem-ctl report` writes: where the data of a run is, and the name of the page."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click
from gem_api.history import HistoryError

from gem_ctl import recorded_run, report, run_report, text
from gem_ctl.local_runs import find_runs
from gem_ctl.prometheus import Prometheus, PrometheusError

Page = tuple[Path, str, str]  # the file to write, what it shows in a few words, and the HTML


def from_prometheus(url: str, run_id: str | None, last: float, out: Path | None) -> Page:
    """The report of a run that Prometheus saw in the last `last` hours. Raises click.ClickException."""
    try:
        source, now = Prometheus(url), time.time()
        run = report.find_run(source, run_id, 3600 * last, now)
        page = report.page(source, run, now)
    except PrometheusError as error:
        raise click.ClickException(str(error)) from error
    return out or _in_this_folder(run.run_id), f"run {run.run_id}, {text.duration(run.end - run.begin)}", page


def from_files(path: Path, out: Path | None) -> Page:
    """The report of the run in this folder, or of this history file. Raises click.ClickException."""
    try:
        run = recorded_run.read_run(path, in_progress=path.is_dir() and path in find_runs(path.parent))
    except HistoryError as error:
        raise click.ClickException(str(error)) from error
    except FileNotFoundError as error:
        raise click.ClickException(
            f"there is no {path}: name a run's folder, or a file of gem-server --history; a report's own name ends in .html"
        ) from error
    except OSError as error:
        raise click.ClickException(f"can't read {error.filename or path}: {error.strerror}") from error
    outcome = f", {run.outcome}" if run.outcome else ""
    what = f"run {run.name}{outcome}, version {run.curves.final:.0f}"
    return (
        out or (path / "report.html" if path.is_dir() else _in_this_folder(run.name)),
        what,
        run_report.page(run, time.time()),
    )


def is_page(path: Path) -> bool:
    """Whether a report can be written there: a name that ends in .html, "-", or a device."""
    special = path.exists() and not path.is_file() and not path.is_dir()
    return path.suffix.lower() in (".html", ".htm") or str(path) == "-" or special


def _in_this_folder(run: str) -> Path:
    return Path(f"gem-{re.sub(r'[^A-Za-z0-9_.-]', '_', run)}.html")
