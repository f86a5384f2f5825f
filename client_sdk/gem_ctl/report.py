"""The report of a run: one HTML page with plots and settings, made from the metrics in Prometheus."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import numpy as np
from gem_api import __version__

from gem_ctl.dashboards import DASHBOARDS
from gem_ctl.page import Content, Picture, Section, build, clock, natural
from gem_ctl.panels import Dashboard, Kind, Panel
from gem_ctl.plots import PlottedQuery, draw
from gem_ctl.prometheus import Prometheus, PrometheusError, Series
from gem_ctl.text import duration

_POINTS = 400  # of a curve
_MAX_POINTS = 10_000  # that Prometheus gives for one query, with a margin
_TARGET = ("job", "instance")  # labels that Prometheus gives every target
_RANGE = "range"  # the label of a server of several
_TAIL = 30.0  # seconds shown after the last commit


@dataclass(frozen=True)
class Run:
    """A run that Prometheus knows.

    Attributes:
        run_id: The run's id.
        instance: The `instance` label of the server; of several, of that of range 0.
        settings: The run's hyper-parameters, as text.
        begin: When Prometheus first saw it, Unix seconds.
        end: Shortly after its last commit, Unix seconds.
        target: The labels that Prometheus's configuration gives the server: `run`, and in Kubernetes its namespace, pod and
            more. They are not the run's own.
        ranges: The `instance` of each range's server, if several hold a range each; else empty.
    """

    run_id: str
    instance: str
    settings: dict[str, str]
    begin: float
    end: float
    target: dict[str, str] = field(default_factory=dict)
    ranges: dict[int, str] = field(default_factory=dict)

    @property
    def servers(self) -> set[str]:
        """The `instance` labels of all servers of the run."""
        return {self.instance, *self.ranges.values()}


def find_run(prometheus: Prometheus, run_id: str | None, last: float, now: float) -> Run:
    """Finds the run with this id, or the newest one, in the last `last` seconds. Raises PrometheusError if there is none."""
    step = max(1.0, last / _MAX_POINTS)
    seen = _seen(prometheus, "gem_run_info", now - last, now, step)
    wanted = [one for one in seen if run_id in (None, one.labels["run_id"])]
    if not wanted:
        raise PrometheusError(_not_found(run_id, {one.labels["run_id"] for one in seen}, last))
    leads = [one for one in wanted if one.labels.get(_RANGE, "0") == "0"]
    newest = max(leads or wanted, key=lambda one: (one.times[-1], one.times[0]))
    labels = dict(newest.labels)
    run, instance = labels.pop("run_id"), labels.pop("instance", "")
    same = [one for one in wanted if one.labels["run_id"] == run and one.labels.get("instance", "") == instance]
    first, final = _first_and_last(prometheus, run, instance, min(one.times[0] for one in same) - step, newest.times[-1])
    ended = _last_commit(prometheus, instance, first, final)
    target = _target(prometheus, instance, first, final)
    settings = {name: value for name, value in _own(labels, target).items() if name != _RANGE}
    return Run(run, instance, settings, first, min(final, ended + _TAIL), target, _ranges(wanted, run))


def _ranges(seen: list[Series], run: str) -> dict[int, str]:
    """The `instance` of each range's server, the newest one if a range has moved; empty if one server holds everything."""
    ours = sorted((one for one in seen if one.labels["run_id"] == run), key=lambda one: float(one.times[-1]))
    numbered = [(one.labels.get(_RANGE, ""), one.labels.get("instance", "")) for one in ours]
    return {int(number): instance for number, instance in numbered if re.fullmatch("[0-9]{1,4}", number)}


def _target(prometheus: Prometheus, instance: str, begin: float, end: float) -> dict[str, str]:
    """The labels of the server's target, without its name in Prometheus."""
    seen = prometheus.values(f"last_over_time({_of('up', instance)}[{max(1, math.ceil(end - begin))}s])", end)
    return {name: value for one in seen for name, value in one.labels.items() if name not in (*_TARGET, "__name__")}


def _own(labels: dict[str, str], target: dict[str, str]) -> dict[str, str]:
    """The labels that the server itself gives a metric."""
    return {name: value for name, value in labels.items() if name not in (*_TARGET, "__name__", *target)}


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
    scrape = prometheus.scrape_interval(run.instance, run.target.get("run", ""))
    step = max(scrape, (run.end - run.begin) / _POINTS)
    window = max(4 * scrape, step)
    content = Content(
        run.run_id,
        f"{clock(run.begin)} to {clock(run.end)} UTC, {duration(run.end - run.begin)}, {_servers(run)}",
        _tiles(prometheus, run, step, window),
        run.settings,
        [_section(prometheus, board, run, step, window) for board in DASHBOARDS],
        _footer(now, window, step),
        warnings={"Alerts": _alerts(prometheus, run, step)},
        versions=_versions(prometheus, run),
        columns=("worker", "commits", "mean staleness", "rejected"),
        workers=_workers(prometheus, run),
    )
    return build(content)


def _servers(run: Run) -> str:
    if not run.ranges:
        return f"server {run.instance}"
    return "servers " + ", ".join(f"{instance} (range {number})" for number, instance in sorted(run.ranges.items()))


def _over(metric: str, run: Run) -> str:
    """All samples of a metric of the run's server during the run, in PromQL."""
    return f"{_of(metric, run.instance)}[{max(1, round(run.end - run.begin))}s]"


def _versions(prometheus: Prometheus, run: Run) -> dict[str, str]:
    """The versions of the server's software; empty if the server does not report them."""
    series = prometheus.values(f"last_over_time({_over('gem_build_info', run)})", run.end)
    labels = {name: value for one in series for name, value in _own(one.labels, run.target).items() if name != _RANGE}
    if "version" in labels:
        labels["gem-ps"] = labels.pop("version")
    return labels


def _workers(prometheus: Prometheus, run: Run) -> list[tuple[str, ...]]:
    """A row per worker: commits and mean staleness under its lease with the most commits, and rejected commits."""
    columns = ("gem_worker_commits_total", "gem_worker_staleness_total", "gem_worker_rejected_total")
    commits, staleness, rejected = (_by_worker(prometheus, run, metric) for metric in columns)
    return [
        (
            name,
            f"{count:,.0f}",
            f"{staleness[name] / count:.1f}" if count and name in staleness else "–",
            f"{rejected.get(name, 0):,.0f}",
        )
        for name, count in sorted(commits.items(), key=lambda each: natural(each[0]))
    ]


def _by_worker(prometheus: Prometheus, run: Run, metric: str) -> dict[str, float]:
    """Each worker's highest value of a counter during the run. The counter restarts with each lease."""
    series = prometheus.values(f"max by (worker) (max_over_time({_over(metric, run)}))", run.end)
    return {one.labels.get("worker", ""): float(one.values[0]) for one in series if np.isfinite(one.values[0])}


def _footer(now: float, window: float, step: float) -> str:
    return f"Written {clock(now)} UTC by gem-ctl {__version__}. A point every {step:.3g} s, rates over {window:.3g} s."


def _tiles(prometheus: Prometheus, run: Run, step: float, window: float) -> list[tuple[str, str]]:
    """The run's most important numbers."""
    whole = f"{max(1, round(run.end - run.begin))}s"

    def over(metric: str) -> str:
        return _over(metric, run)

    def mean(metric: str) -> str:
        return f"sum(increase({over(metric + '_sum')})) / sum(increase({over(metric + '_count')}))"

    each = sorted(run.servers)  # every server holds its own parameters
    parameters = " or ".join(f"last_over_time({_of('gem_parameters', one)}[{whole}])" for one in each)
    applied = _of("gem_commits_total", run.instance, outcome="applied")
    rates = f"sum(rate({applied}[{max(1, round(window))}s]))[{whole}:{max(1, round(step))}s]"
    figures = (
        ("parameters", f"sum({parameters})", "{:,.0f}"),
        ("accuracy", f"max(last_over_time({over('gem_evaluation_accuracy')}))", "{:.2%}"),
        ("training loss", f"max(last_over_time({over('gem_training_loss')}))", "{:.4f}"),
        ("commits", f"max(max_over_time({over('gem_central_version')}))", "{:,.0f}"),
        ("commits/s, at most", f"max_over_time({rates})", "{:,.1f}"),
        ("workers, at most", f"max(max_over_time({over('gem_active_workers')}))", "{:,.0f}"),
        ("mean staleness", mean("gem_commit_staleness"), "{:.1f}"),
        ("mean π", mean("gem_pi"), "{:.3f}"),
    )
    values = [(name, prometheus.value(query, run.end), template) for name, query, template in figures]
    return [(name, template.format(value)) for name, value, template in values if value is not None and np.isfinite(value)]


def _alerts(prometheus: Prometheus, run: Run, step: float) -> list[str]:
    """The alerts that fired during the run, for one of its servers, or for no server of this run or of any."""
    fired = prometheus.range('ALERTS{alertstate="firing", alertname=~"Gem.*"}', run.begin, run.end, step)
    mine = [one for one in fired if one.labels.get("instance", run.instance) in run.servers and _may_be_of(run, one.labels)]
    return [
        f"{_named(one.labels)}, from minute {(one.times[0] - run.begin) / 60:.1f} to {(one.times[-1] - run.begin) / 60:.1f}"
        for one in mine
    ]


def _named(labels: dict[str, str]) -> str:
    """An alert's name, and the range that it is about."""
    return labels["alertname"] + (f" (range {labels[_RANGE]})" if labels.get(_RANGE) else "")


def _may_be_of(run: Run, labels: dict[str, str]) -> bool:
    return labels.get("run", "") in ("", run.target.get("run", "")) and labels.get("run_id", run.run_id) == run.run_id


def _section(prometheus: Prometheus, board: Dashboard, run: Run, step: float, window: float) -> Section:
    panels = [panel for panel in board.panels if panel.kind is not Kind.NUMBER]
    pictures = [Picture(one.title, one.description, _draw(prometheus, one, run, step, window)) for one in panels]
    return Section(board.title.rpartition("/ ")[2], board.description, pictures)


def _draw(prometheus: Prometheus, panel: Panel, run: Run, step: float, window: float) -> str:
    plotted: list[PlottedQuery] = []
    for query in panel.queries:
        expr = fill_in(query.expr, run.instance, window)
        plotted.append((query, prometheus.range(expr, run.begin, run.end, step)))
    return draw(panel, plotted, run.begin, run.end)


def fill_in(expr: str, instance: str, window: float) -> str:
    """A panel's query for one server, with rates over `window` seconds."""
    return expr.replace("$server", _quoted(re.escape(instance))).replace("$__rate_interval", f"{max(1, round(window))}s")
