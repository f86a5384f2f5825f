"""The dashboard of a run whose θ several servers hold: one line for each range.

Every query asks for a label `range`, so that the panels are empty if one server holds everything.
"""

from __future__ import annotations

from gem_dashboards.panels import Dashboard, Limits, Panel, Query
from gem_dashboards.queries import OF_RUN, ONCE_OF_RUN, WINDOW, number

_S = '{range!=""}'
_EACH = "range {{range}}"


def _each(expr: str, by: str = "range") -> str:
    return f"max by ({by}) ({expr} {OF_RUN})"


def _rate(metric: str, labels: str = "") -> str:
    return f'rate({metric}{{range!=""{labels}}}{WINDOW})'


def _slowest(metric: str) -> str:
    """The 99 % quantile of a histogram, of each range."""
    return f"histogram_quantile(0.99, sum by (le, range) ({_rate(metric + '_bucket')} {OF_RUN}))"


def _lines(title: str, description: str, expr: str, unit: str = "short", **more: float | bool | Limits) -> Panel:
    return Panel(title, description, (Query(expr, _EACH),), unit, **more)  # type: ignore[arg-type]


_VERSION = f"gem_central_version{_S}"
_RESPOND, _EXPECTED = f"count(gem_ranges{_S} {OF_RUN})", f"max(last_over_time(gem_ranges{_S}[1d]) {ONCE_OF_RUN})"
_BUSY = Limits(orange=0.8, red=0.95)

RANGES = Dashboard(
    "gem-ranges",
    "GEM / Ranges",
    "Several servers hold a range of θ each: are all of them up, do their versions move together, and which one is slow? Empty "
    "if one server holds everything.",
    (
        number(
            "Ranges missing",
            "Servers of this run that do not respond. Good: 0. Else all workers wait for them. Before the first worker has "
            "joined, only the server of range 0 counts as there.",
            f"{_EXPECTED} - {_RESPOND}",
            limits=Limits(orange=1, red=1),
        ),
        number(
            "Version spread",
            "Highest version of a range less the lowest. Good: no more than the commits under way, and those between two "
            "scrapes.",
            f"max({_VERSION} {OF_RUN}) - min({_VERSION} {OF_RUN})",
        ),
        number(
            "Least free memory",
            "Share of memory_limit in use on the server with the least room. Good: below 80 %. It decides how many workers "
            "fit.",
            f"max(gem_memory_bytes{_S} / (gem_memory_limit_bytes{_S} > 0) {OF_RUN})",
            "percentunit",
            limits=Limits(orange=0.8, red=0.9),
        ),
        Panel(
            "Servers that respond",
            "Servers of this run that Prometheus reaches. Good: as many as there are ranges, the dashed line.",
            (Query(_EXPECTED, "ranges", dashed=True), Query(_RESPOND, "respond")),
        ),
        _lines(
            "Versions by range",
            "Commits that each range has applied. Good: the lines lie on each other. A worker that dies in the middle of a "
            "commit, or a part that is rejected, leaves a difference of one for good. A line far below the others is a range "
            "from an older checkpoint.",
            _each(_VERSION),
        ),
        _lines(
            "Commits behind the foremost range",
            "Good: steady, and near 0. The servers are scraped at different times, so a fast run shows some commits here. A "
            "line that rises: this range rejects what the others apply.",
            f"scalar(max({_VERSION} {OF_RUN})) - {_each(_VERSION)}",
        ),
        _lines(
            "Commits per second by range",
            "Good: the lines lie on each other: a commit is over when all ranges have answered.",
            _each(_rate("gem_commits_total", ', outcome="applied"')),
        ),
        _lines(
            "Share of time spent applying, by range",
            "Good: all alike, below 80 %. One far above the others: its machine is slower, or other programs run there. "
            "Workers wait for the slowest.",
            _each(_rate("gem_commit_apply_seconds_sum")),
            "percentunit",
            most=1,
            limits=_BUSY,
        ),
        _lines(
            "Queue by range",
            "Commits that wait or are being applied. Good: all alike, mostly 0 or 1. The longest queue is at the slowest "
            "range.",
            _each(f"gem_commit_queue_length{_S}"),
        ),
        _lines(
            "Wait before a commit is applied, by range",
            "99 of 100 commits waited less. Good: all alike.",
            _slowest("gem_commit_wait_seconds"),
            "s",
        ),
        _lines(
            "Time to apply a commit, by range",
            "99 of 100 commits took less. Good: all alike: the ranges are of equal size.",
            _slowest("gem_commit_apply_seconds"),
            "s",
        ),
        _lines(
            "Memory by range",
            "Bytes held for θ, copies of it and the workers' buffers. Good: all alike, below memory_limit.",
            _each(f"gem_memory_bytes{_S}"),
            "bytes",
        ),
        _lines(
            "Bytes per second by range",
            "Tensor data received and sent. Good: all alike, far below the capacity of each server's network.",
            _each(f"{_rate('gem_received_bytes_total')} + {_rate('gem_sent_bytes_total')}"),
            "Bps",
        ),
        _lines(
            "Time to write to the log, by range",
            "99 of 100 groups of records took less. Good: all alike. A commit is acknowledged only once it is in the log, so "
            "one slow disk holds up every worker.",
            _slowest("gem_log_flush_seconds"),
            "s",
        ),
        _lines(
            "Records that wait for the log, by range",
            "Good: about the number of workers at most. A line that does not fall: this range's disk is full or stalls.",
            _each(f"gem_log_waiting_records{_S}"),
        ),
        _lines(
            "Log by range",
            "Bytes of the log since the last checkpoint: what a server reads when it starts again. Good: a saw-tooth.",
            _each(f"gem_log_bytes{_S}"),
            "bytes",
        ),
        Panel(
            "Rejected commits by range and error",
            "Good: none. An error at one range alone: that part of the gradient is bad, or its leases end there alone: its "
            "network.",
            (
                Query(
                    f'max by (range, error) (increase(gem_commits_rejected_total{{range!=""}}{WINDOW}) {OF_RUN})',
                    "range {{range}}: {{error}}",
                ),
            ),
        ),
        _lines(
            "Age of the last checkpoint, by range",
            "Good: each a saw-tooth no higher than checkpoint_interval; after the run they keep growing.",
            f"time() - {_each(f'gem_checkpoint_timestamp_seconds{_S}')}",
            "s",
        ),
    ),
    alerts=True,
)
