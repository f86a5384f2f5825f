"""The report of a run: one HTML page, made from the folder of gem-train or from the history of gem-server."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from gem_api import __version__
from gem_api.curves import Column
from gem_api.history import HistoryError

from gem_ctl import output
from gem_ctl.curves import MAX_STALENESS, RunCurves
from gem_ctl.local_runs import find_runs
from gem_ctl.page import Content, Picture, Section, build, clock, natural
from gem_ctl.plots import Line, draw_distribution, draw_lines
from gem_ctl.recorded_run import RecordedRun, read_run
from gem_ctl.text import counts, duration

# What π is, in the words of the guides.
PI = (
    "π is the factor by which the server multiplies a commit's step, for each parameter. It is the smaller, the further θ has "
    "moved from where the worker computed its gradient."
)
_SMOOTHED = 50  # commits that smoothed values and rates are taken over, at least
_NOT_SETTINGS = ("runs", "resume", "data")  # of run.json: they describe the machine, or one start of the run
_RAY = ("ray_address", "ray_labels", "ray_spread", "resources", "working_dir")  # settings of a run on Ray alone
_OUTCOMES = {
    "complete": "complete",
    "diverged": "diverged: a worker's loss was NaN or infinite",
    "stopped": "stopped: gem-train --resume continues it",
    "failed": "failed: a process kept dying; logs/ shows why",
}


def page(run: RecordedRun, now: float) -> str:
    """The report as HTML that needs no other file. `now` is in Unix seconds."""
    curves = run.curves
    points = f"Each point is the mean of {curves.width:,.0f} commits; " if curves.width > 1 else "Each point is a commit; "
    return build(
        Content(
            _name(run),
            _subtitle(run),
            _tiles(run),
            _settings(run),
            _sections(run) if curves.first is not None else [],
            f"Written {clock(now)} UTC by gem-ps {__version__}. {points}smoothed values and commits/s are over "
            f"{max(_SMOOTHED, curves.width):,.0f} commits.",
            notes=run.notes,
            versions=run.versions,
            columns=(
                "worker",
                "commits",
                "share",
                "mean staleness",
                *(["discarded"] if curves.discarded else []),
                "last at version",
            ),
            workers=_workers(run),
        )
    )


def _name(run: RecordedRun) -> str:
    """The run's name; of a history alone, which has none, when it began."""
    begun = f"of {clock(run.curves.begin)} UTC" if _has_times(run) else f"recorded in {run.source}"
    return run.name or begun


def _subtitle(run: RecordedRun) -> str:
    parts, curves = [_OUTCOMES.get(run.outcome, run.outcome)], run.curves
    if _has_times(run):
        times = f"{clock(curves.begin)} to {clock(curves.end)} UTC, {duration(curves.end - curves.begin)}"
        parts += [run.source, times]
    return " · ".join(filter(None, parts))


def _has_times(run: RecordedRun) -> bool:
    return math.isfinite(run.curves.begin) and math.isfinite(run.curves.end)


def _settings(run: RecordedRun) -> dict[str, str]:
    left_out = _NOT_SETTINGS if run.options.get("on") == "ray" else (*_NOT_SETTINGS, *_RAY)
    return {name: _text(value) for name, value in run.options.items() if name not in left_out and _is_shown(value)}


def _is_shown(value: Any) -> bool:
    return value not in (None, "", {}, []) and value is not False


def _text(value: Any) -> str:
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _tiles(run: RecordedRun) -> list[tuple[str, str]]:
    """The run's most important numbers."""
    curves = run.curves
    accuracies = [accuracy for _, _, accuracy in run.evaluations if accuracy is not None]
    figures = (
        ("accuracy", accuracies[-1] if accuracies else None, "{:.2%}"),
        ("evaluation loss", run.evaluations[-1][1] if run.evaluations else None, "{:.4f}"),
        ("training loss", _last(curves.smoothed("loss", _SMOOTHED)), "{:.4f}"),
        ("commits", curves.final, "{:,.0f}"),
        ("samples", curves.samples or None, "{:,.0f}"),
        ("commits/s", _median(curves.rates(_SMOOTHED)), "{:,.1f}"),
        ("workers", len(curves.names), "{:,.0f}"),
        ("commits via", counts(run.commits_via) or None, "{}"),
        ("mean staleness", _ratio(curves.per_worker.staleness.sum(), curves.applied), "{:.1f}"),
        ("median π", _last(curves.smoothed("pi_median", curves.applied)), "{:.3f}"),
        ("discarded", curves.discarded or None, "{:,.0f}"),
    )
    return [(name, template.format(value)) for name, value, template in figures if value is not None]


def _last(values: Column) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None


def _median(values: Column) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _workers(run: RecordedRun) -> list[tuple[str, ...]]:
    curves, totals = run.curves, run.curves.per_worker
    rows = {
        name: (
            name,
            f"{totals.commits[number]:,.0f}",
            f"{totals.commits[number] / max(1, curves.applied):.1%}",
            f"{totals.staleness[number] / totals.commits[number]:.1f}" if totals.commits[number] else "–",
            *([f"{totals.discarded[number]:,.0f}"] if curves.discarded else []),
            f"{totals.last[number]:,.0f}",
        )
        for number, name in enumerate(curves.names)
    }
    return [rows[name] for name in sorted(rows, key=natural)]


def _sections(run: RecordedRun) -> list[Section]:
    return [
        Section("Training", "Does the model learn, and how fast?", _training(run)),
        Section("Scaling factor π", "What Gradient Energy Matching does to the commits.", _pi(run)),
        Section("Workers and staleness", "Who is at work, and how old the gradients are when they arrive.", _staleness(run)),
    ]


def _training(run: RecordedRun) -> tuple[Picture, ...]:
    curves = run.curves
    versions = curves.positions()
    losses = {
        "training": (versions, curves.smoothed("loss", _SMOOTHED)),
        "evaluation": _evaluated([(version, loss) for version, loss, _ in run.evaluations]),
    }
    accuracy = {"accuracy": _evaluated([(version, score) for version, _, score in run.evaluations if score is not None])}
    return (
        _picture(
            run,
            "Loss",
            "Training loss is smoothed; evaluation is on held-out data. Good: both fall and stay close. An evaluation loss "
            "that rises while the training loss falls is overfitting; a training loss that jumps is a learning rate too high.",
            losses,
            log=None,
        ),
        _picture(
            run, "Accuracy", "Share of correct answers on held-out data. Good: rises, then levels off.", accuracy, share=True
        ),
        _picture(
            run,
            "Commits per second",
            "Good: steady. A dip is a restart or a pause; a lower level is fewer workers or a busy machine.",
            {"commits/s": (versions, curves.rates(_SMOOTHED))},
        ),
    )


def _pi(run: RecordedRun) -> tuple[Picture, ...]:
    curves, versions = run.curves, run.curves.positions()
    return (
        _picture(
            run,
            "Median π of a commit",
            f"{PI} Good: steady with an optimizer on the server, where it is at most 1; with SGD it may rise as training "
            "settles. The more workers, the smaller; with dozens it may be 0.",
            {"smoothed": (versions, curves.smoothed("pi_median", _SMOOTHED))},
        ),
        _picture(
            run,
            "Share of π at its bounds",
            "Share of parameters with π = 0 and with π = π_max. Good: not nearly all at 0, where commits have no effect. The "
            "maximum is 1 with an optimizer, the whole step, and 5 with SGD, which many reach as gradients shrink.",
            {
                "π = 0": (versions, curves.smoothed("pi_zero_ratio", _SMOOTHED)),
                "π = π_max": (versions, curves.smoothed("pi_max_ratio", _SMOOTHED)),
            },
            share=True,
        ),
        _picture(
            run,
            "Energy of proxy and central variable",
            "Energy of one step of the proxy, and of what θ has moved since the gradient was computed; with an optimizer, of "
            "how far θ is from where it was foreseen. Good: the two move together, and fall as training settles.",
            {
                "proxy": (versions, curves.smoothed("proxy_energy", _SMOOTHED)),
                "central variable": (versions, curves.smoothed("central_energy", _SMOOTHED)),
            },
            log=True,
        ),
    )


def _staleness(run: RecordedRun) -> tuple[Picture, ...]:
    curves, versions = run.curves, run.curves.positions()
    expected = np.maximum(0.0, curves.workers() - 1)
    return (
        _picture(
            run,
            "Workers at work",
            "Workers whose next commit was on its way. Good: as many as were started; at the end, workers run out of data one "
            "after the other.",
            {"workers": (versions, curves.workers())},
            whole=True,
        ),
        _picture(
            run,
            "Staleness",
            "Commits that others had applied between a worker's pull and its own commit. Good: a mean of n − 1 with n "
            "workers of equal speed, the dashed line. A maximum far above it is a slow worker.",
            {
                "expected: workers − 1": (versions, expected),
                "mean": (versions, curves.smoothed("staleness", _SMOOTHED)),
                "maximum": (versions, curves.highest_staleness(_SMOOTHED)),
            },
            whole=True,
        ),
        Picture(
            "Distribution of staleness",
            "Share of the commits with each staleness. Good: one hill around the number of workers less 1. A second hill far "
            "above it is a slow worker.",
            draw_distribution("Distribution of staleness", curves.distribution, _staleness_axis(curves)),
        ),
    )


def _staleness_axis(curves: RunCurves) -> str:
    return "staleness" + (f" (the last bar: {MAX_STALENESS:,} and more)" if curves.distribution[MAX_STALENESS] else "")


def _evaluated(points: list[tuple[float, float]]) -> tuple[Column, Column]:
    """The points in the order of their versions; of several of one version, the last."""
    ordered = sorted(dict(points).items())
    return np.array([version for version, _ in ordered]), np.array([value for _, value in ordered])


def _picture(
    run: RecordedRun,
    title: str,
    description: str,
    lines: Mapping[str, tuple[Column, Column]],
    *,
    share: bool = False,
    log: bool | None = False,
    whole: bool = False,
) -> Picture:
    """A plot over the commits. A line called "evaluation" or "accuracy" has dots; one called "expected: ..." is dashed."""
    drawn = {
        name: Line(versions, values, dashed=name.startswith("expected"), dots=name in ("evaluation", "accuracy"))
        for name, (versions, values) in lines.items()
    }
    first = run.curves.first or 0.0
    last = max(run.curves.final, *(version for version, _, _ in run.evaluations), first)
    plot = draw_lines(title, drawn, max(0.0, first - 1), last, "commits applied", share=share, log=log, whole=whole)
    return Picture(title, description, plot)


def write_report(folder: Path, curves: RunCurves) -> Path:
    """Writes report.html of a run that has ended into its folder, and returns its path. `curves` are its commits.

    Raises OSError."""
    out = folder / "report.html"
    output.write(out, page(read_run(folder, in_progress=False, curves=curves), time.time()).encode(errors="replace"))
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
    return out or named, f"run {_name(run)}{outcome}, version {run.curves.final:.0f}", page(run, time.time())


def is_page(path: Path) -> bool:
    """Whether a report can be written there: a name that ends in .html, "-", or a device."""
    special = path.exists() and not path.is_file() and not path.is_dir()
    return path.suffix.lower() in (".html", ".htm") or str(path) == "-" or special
