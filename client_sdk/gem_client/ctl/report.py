"""The report of a run: one HTML page with plots and settings, made from the metrics in Prometheus."""

from __future__ import annotations

import html
import math
import re
import time
from dataclasses import dataclass

import numpy as np
from gem_api import __version__

from gem_client.ctl.dashboards import DASHBOARDS
from gem_client.ctl.panels import Dashboard, Kind, Panel
from gem_client.ctl.plots import PlottedQuery, draw
from gem_client.ctl.prometheus import Prometheus, PrometheusError, Series
from gem_client.ctl.text import duration

_POINTS = 400  # of a curve
_MAX_POINTS = 10_000  # that Prometheus gives for one query, with a margin
_MAX_ROWS = 100  # of the table of workers
_TARGET = ("job", "instance")  # labels that Prometheus itself gives
_TAIL = 30.0  # seconds shown after the last commit

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1240px; margin: 0 auto; padding: 24px; }
h1 { margin: 0 0 4px; } h2 { margin: 40px 0 4px; border-bottom: 2px solid #1f4e79; padding-bottom: 4px; }
h3 { margin: 0; font-size: 15px; } .quiet { color: #666; } p { margin: 4px 0 12px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.tile { border: 1px solid #ddd; border-radius: 8px; padding: 10px 16px; min-width: 120px; }
.tile b { display: block; font-size: 24px; color: #1f4e79; font-weight: 600; }
.panels { display: grid; gap: 28px 24px; margin-top: 16px; }
.panels { grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); }
.panel svg { width: 100%; height: auto; } .panel p { font-size: 13px; color: #666; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(260px, 100%), 1fr)); gap: 2px 24px; }
dl div { display: flex; gap: 8px; } dt { color: #666; flex: none; } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } th { color: #666; font-weight: normal; text-align: right; }
td, th { padding: 2px 16px 2px 0; } td { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } h1, p, h3 { overflow-wrap: anywhere; }
.alert { color: #c0392b; }
@media print { body { max-width: none; } .panel { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>GEM run {run_id}</title>
<style>{style}</style>
</head>
<body>
<h1>Run {run_id}</h1>
<p class="quiet">{when}, server {server}</p>
<div class="tiles">{tiles}</div>
{alerts}
<h2>Settings</h2>
<dl>{settings}</dl>
{versions}
{workers}
{sections}
<p class="quiet">{footer}</p>
</body>
</html>
"""


@dataclass(frozen=True)
class Run:
    """A run that Prometheus knows.

    Attributes:
        run_id: The run's id.
        instance: The server's `instance` label.
        settings: The run's hyper-parameters, as text.
        begin: When Prometheus first saw it, Unix seconds.
        end: Shortly after its last commit, Unix seconds.
    """

    run_id: str
    instance: str
    settings: dict[str, str]
    begin: float
    end: float


def find_run(prometheus: Prometheus, run_id: str | None, last: float, now: float) -> Run:
    """Finds the run with this id, or the newest one, in the last `last` seconds. Raises PrometheusError if there is none."""
    step = max(1.0, last / _MAX_POINTS)
    seen = _seen(prometheus, "gem_run_info", now - last, now, step)
    wanted = [one for one in seen if run_id in (None, one.labels["run_id"])]
    if not wanted:
        raise PrometheusError(_not_found(run_id, {one.labels["run_id"] for one in seen}, last))
    newest = max(wanted, key=lambda one: (one.times[-1], one.times[0]))
    labels = dict(newest.labels)
    run, instance = labels.pop("run_id"), labels.pop("instance", "")
    settings = {name: value for name, value in labels.items() if name not in (*_TARGET, "__name__")}
    same = [one for one in wanted if one.labels["run_id"] == run and one.labels.get("instance", "") == instance]
    first, final = _first_and_last(prometheus, run, instance, min(one.times[0] for one in same) - step, newest.times[-1])
    ended = _last_commit(prometheus, instance, first, final)
    return Run(run, instance, settings, first, min(final, ended + _TAIL))


def _seen(prometheus: Prometheus, metric: str, begin: float, end: float, step: float) -> list[Series]:
    """The metric's last value within each step, so that a short run between two steps is not missed."""
    return prometheus.range(f"last_over_time({metric}[{math.ceil(step)}s])", begin, end, step)


def _first_and_last(prometheus: Prometheus, run: str, instance: str, begin: float, end: float) -> tuple[float, float]:
    """When Prometheus first and last saw the run, to the second if possible."""
    query = _of("gem_run_info", instance, run_id=run)
    step = max(1.0, (end - begin) / _MAX_POINTS)
    times = [one.times for one in _seen(prometheus, query, begin, end + step, step)]  # the last step may reach beyond the end
    sightings = np.minimum(np.concatenate(times), end) if times else np.array([begin, end])
    return float(sightings.min()), float(sightings.max())


def _not_found(run_id: str | None, known: set[str], last: float) -> str:
    if known:
        return f"Prometheus has no run {run_id!r}, only {', '.join(sorted(known))}"
    return (
        f"Prometheus has no metrics of a server from the last {duration(last)}. Does it scrape gem-server? "
        "Use --last to look further back"
    )


def _last_commit(prometheus: Prometheus, instance: str, begin: float, end: float) -> float:
    """When the version last changed. The report leaves out the time when the server idles after the run."""
    step = max(1.0, (end - begin) / _MAX_POINTS)
    versions = prometheus.range(_of("gem_central_version", instance), begin, end, step)
    times = [one.times[1:][np.diff(one.values) != 0] for one in versions]
    return max((float(changed[-1]) for changed in times if changed.size), default=end)


def _of(metric: str, instance: str, **labels: str) -> str:
    """The metric of one server, with these labels."""
    wanted = ", ".join(f'{name}="{_quoted(value)}"' for name, value in {"instance": instance, **labels}.items())
    return f"{metric}{{{wanted}}}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def page(prometheus: Prometheus, run: Run, now: float) -> str:
    """The report as HTML that needs no other file. Raises PrometheusError."""
    scrape = prometheus.scrape_interval(run.instance)
    step = max(scrape, (run.end - run.begin) / _POINTS)
    window = max(4 * scrape, step)
    return _PAGE.format(
        run_id=html.escape(run.run_id),
        style=_STYLE,
        when=f"{_clock(run.begin)} to {_clock(run.end)} UTC, {duration(run.end - run.begin)}",
        server=html.escape(run.instance),
        tiles=_tiles(prometheus, run, step, window),
        alerts=_alerts(prometheus, run, step),
        settings=_listed(run.settings),
        versions=_versions(prometheus, run),
        workers=_workers(prometheus, run),
        sections="\n".join(_section(prometheus, board, run, step, window) for board in DASHBOARDS),
        footer=_footer(now, window, step),
    )


def _listed(texts: dict[str, str]) -> str:
    """Names and values, sorted by name."""
    return "".join(
        f"<div><dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(value) or '–'}</dd></div>"
        for name, value in sorted(texts.items())
    )


def _over(metric: str, run: Run) -> str:
    """All samples of a metric of the run's server during the run, in PromQL."""
    return f"{_of(metric, run.instance)}[{max(1, round(run.end - run.begin))}s]"


def _versions(prometheus: Prometheus, run: Run) -> str:
    """The versions of the server's software; empty if the server does not report them."""
    series = prometheus.values(f"last_over_time({_over('gem_build_info', run)})", run.end)
    labels = {name: value for one in series for name, value in one.labels.items() if name not in (*_TARGET, "__name__")}
    if "version" in labels:
        labels["gem-ps"] = labels.pop("version")
    return f"<h2>Versions</h2><dl>{_listed(labels)}</dl>" if labels else ""


def _workers(prometheus: Prometheus, run: Run) -> str:
    """A row per worker: commits and mean staleness under its lease with the most commits, and rejected commits."""
    columns = ("gem_worker_commits_total", "gem_worker_staleness_total", "gem_worker_rejected_total")
    commits, staleness, rejected = (_by_worker(prometheus, run, metric) for metric in columns)
    rows = [
        f"<tr><td>{html.escape(name)}</td><td>{count:,.0f}</td>"
        f"<td>{f'{staleness[name] / count:.1f}' if count and name in staleness else '–'}</td>"
        f"<td>{rejected.get(name, 0):,.0f}</td></tr>"
        for name, count in sorted(commits.items(), key=lambda each: _natural(each[0]))
    ]
    if not rows:
        return ""
    more = f'<p class="quiet">and {len(rows) - _MAX_ROWS} more</p>' if len(rows) > _MAX_ROWS else ""
    head = "<tr><th>worker</th><th>commits</th><th>mean staleness</th><th>rejected</th></tr>"
    return f'<h2>Workers</h2><div class="wide"><table>{head}{"".join(rows[:_MAX_ROWS])}</table></div>{more}'


def _by_worker(prometheus: Prometheus, run: Run, metric: str) -> dict[str, float]:
    """Each worker's highest value of a counter during the run. The counter restarts with each lease."""
    series = prometheus.values(f"max by (worker) (max_over_time({_over(metric, run)}))", run.end)
    return {one.labels.get("worker", ""): float(one.values[0]) for one in series if np.isfinite(one.values[0])}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _footer(now: float, window: float, step: float) -> str:
    return f"Written {_clock(now)} UTC by gem-ctl {__version__}. A point every {step:.3g} s, rates over {window:.3g} s."


def _tiles(prometheus: Prometheus, run: Run, step: float, window: float) -> str:
    """The run's most important numbers."""
    whole = f"{max(1, round(run.end - run.begin))}s"

    def over(metric: str) -> str:
        return _over(metric, run)

    def mean(metric: str) -> str:
        return f"sum(increase({over(metric + '_sum')})) / sum(increase({over(metric + '_count')}))"

    applied = _of("gem_commits_total", run.instance, outcome="applied")
    rates = f"sum(rate({applied}[{max(1, round(window))}s]))[{whole}:{max(1, round(step))}s]"
    figures = (
        ("parameters", f"max(last_over_time({over('gem_parameters')}))", "{:,.0f}"),
        ("accuracy", f"max(last_over_time({over('gem_evaluation_accuracy')}))", "{:.2%}"),
        ("training loss", f"max(last_over_time({over('gem_training_loss')}))", "{:.4f}"),
        ("commits", f"max(max_over_time({over('gem_central_version')}))", "{:,.0f}"),
        ("commits/s, at most", f"max_over_time({rates})", "{:,.1f}"),
        ("workers, at most", f"max(max_over_time({over('gem_active_workers')}))", "{:,.0f}"),
        ("mean staleness", mean("gem_commit_staleness"), "{:.1f}"),
        ("mean π", mean("gem_pi"), "{:.3f}"),
    )
    values = [(name, prometheus.value(query, run.end), template) for name, query, template in figures]
    shown = [(name, template.format(value)) for name, value, template in values if value is not None and np.isfinite(value)]
    return "".join(f'<div class="tile"><b>{value}</b>{html.escape(name)}</div>' for name, value in shown)


def _alerts(prometheus: Prometheus, run: Run, step: float) -> str:
    """The alerts that fired during the run, for this server or for no server in particular."""
    fired = prometheus.range('ALERTS{alertstate="firing", alertname=~"Gem.*"}', run.begin, run.end, step)
    mine = [one for one in fired if one.labels.get("instance", run.instance) == run.instance]
    rows = [
        f'<li class="alert">{html.escape(one.labels["alertname"])}, from minute {(one.times[0] - run.begin) / 60:.1f} '
        f"to {(one.times[-1] - run.begin) / 60:.1f}</li>"
        for one in mine
    ]
    return f"<h2>Alerts</h2><ul>{''.join(rows)}</ul>" if rows else ""


def _section(prometheus: Prometheus, board: Dashboard, run: Run, step: float, window: float) -> str:
    drawn = [(panel, _picture(prometheus, panel, run, step, window)) for panel in board.panels if panel.kind is not Kind.NUMBER]
    blocks = [
        f'<div class="panel"><h3>{html.escape(panel.title)}</h3><p>{html.escape(panel.description)}</p>{picture}</div>'
        for panel, picture in drawn
        if picture
    ]
    if not blocks:
        return ""
    title = board.title.rpartition("/ ")[2]
    return (
        f'<h2>{html.escape(title)}</h2><p class="quiet">{html.escape(board.description)}</p>'
        f'<div class="panels">{"".join(blocks)}</div>'
    )


def _picture(prometheus: Prometheus, panel: Panel, run: Run, step: float, window: float) -> str:
    plotted: list[PlottedQuery] = []
    for query in panel.queries:
        expr = fill_in(query.expr, run.instance, window)
        plotted.append((query, prometheus.range(expr, run.begin, run.end, step)))
    return draw(panel, plotted, run.begin, run.end)


def fill_in(expr: str, instance: str, window: float) -> str:
    """A panel's query for one server, with rates over `window` seconds."""
    return expr.replace("$server", _quoted(re.escape(instance))).replace("$__rate_interval", f"{max(1, round(window))}s")


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
