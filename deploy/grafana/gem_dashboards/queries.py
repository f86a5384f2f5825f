"""The queries that the panels are made of.

In a query, `$server` stands for a regular expression that matches the servers' `instance` labels, and `$__rate_interval` for a
time that holds several scrapes. Grafana fills them in.

The workers of a server have instances of their own. They are those with the same label `run` as the server, which
Prometheus's configuration gives to both. So several runs in one Prometheus do not mix. If neither has the label, all workers
match.

If several servers hold a range of θ each, `$server` is the one that leads. Its samples have the label `range="0"`; those of a
server that holds everything have no such label. What every server counts again (commits, workers, samples, staleness, loss) is
asked of the leader. What each has of its own (memory, queue, π of its parameters) is asked of all servers of the same run
(`OF_RUN`): the panel shows the sum, or the worst. The dashboard "Ranges" has a line for each.
"""

from __future__ import annotations

from collections.abc import Callable

from gem_dashboards.panels import Kind, Limits, Panel, Query

OF_LEADER = 'instance=~"$server", range=~"0|"'
LEADER = f"{{{OF_LEADER}}}"
WINDOW = "[$__rate_interval]"
SERVER_UP = 'up{job="gem-server", instance=~"$server"}'
# The servers of a run tell its id. That of the chosen server is remembered, so that its loss does not hide the others.
_RUN_ID = 'and on (run_id) last_over_time(gem_run_info{instance=~"$server"}[1d])'
OF_RUN = f"and on (job, instance) (gem_run_info {_RUN_ID})"
ONCE_OF_RUN = f"and on (job, instance) (last_over_time(gem_run_info[1d]) {_RUN_ID})"  # servers that do not respond, too
SAME_RUN = f"and on (run) {SERVER_UP}"
WORKERS = '{job="gem-worker"}'


def rate(metric: str, labels: str = OF_LEADER) -> str:
    return f"rate({metric}{{{labels}}}{WINDOW})"


def rate_of_all(metric: str) -> str:
    """The rate of each server of the run."""
    return f"rate({metric}{WINDOW}) {OF_RUN}"


def all_of(metric: str) -> str:
    """The metric of each server of the run."""
    return f"{metric} {OF_RUN}"


def quantiles(rates: str, *shares: float) -> tuple[Query, ...]:
    """Quantiles of a histogram, from the rates of its buckets."""
    buckets = f"sum by (le) ({rates})"
    return tuple(Query(f"histogram_quantile({share}, {buckets})", f"{100 * share:g} %") for share in shares)


def by_label(label: str, metric: str, prefix: str = "", only: str = "") -> tuple[Query, ...]:
    """The median and the 99 % quantile of a histogram of all servers, for each value of a label, or
    for those whose quantile meets the condition `only`."""
    buckets = f"sum by (le, {label}) ({rate_of_all(metric + '_bucket')})"
    return tuple(
        Query(f"histogram_quantile({share}, {buckets}){only}", f"{prefix}{{{{{label}}}}}, {100 * share:g} %")
        for share in (0.5, 0.99)
    )


def number(title: str, description: str, expr: str, unit: str = "short", limits: Limits | None = None) -> Panel:
    return Panel(title, description, (Query(expr),), unit, Kind.NUMBER, limits=limits)


def heatmap(title: str, description: str, increase: str) -> Panel:
    """A heatmap, from the increases of a histogram's buckets."""
    buckets = f"sum by (le) ({increase})"
    return Panel(title, description, (Query(buckets, "{{le}}"),), "short", Kind.HEATMAP)


def mean(metric: str, rates: Callable[[str], str] = rate) -> str:
    return f"sum({rates(metric + '_sum')}) / sum({rates(metric + '_count')})"


def of_workers(metric: str) -> str:
    """What the run's worker processes export themselves, in parentheses."""
    return f"({metric} {SAME_RUN})"


def each_worker(top: str, bottom: str) -> str:
    return f"sum by (worker) ({rate(top)}) / sum by (worker) ({rate(bottom)})"
