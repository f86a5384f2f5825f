"""What one wants to see of a run, as questions to Prometheus. The Grafana dashboards and the HTML report are both made of this.

`$server` in a query stands for a regular expression of the servers' `instance` labels, `$__rate_interval` for a span of
time that holds several scrapes; Grafana knows both, `gem_client.ctl.report` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a panel is drawn."""

    LINES = "lines"
    HEATMAP = "heatmap"  # its one query gives a histogram's buckets, by `le`
    NUMBER = "number"  # the newest value


@dataclass(frozen=True)
class Query:
    """A question to Prometheus.

    Attributes:
        expr: In PromQL.
        legend: What its series are called; {{label}} stands for a label's value.
        dashed: Whether it is a line to compare with.
    """

    expr: str
    legend: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Limits:
    """From where on a value is orange, and from where on it is red; below both it is green.

    Attributes:
        orange: Look at it when there is time.
        red: Look at it now.
        falling: Whether low values are the bad ones: then orange and red begin below the limits.
    """

    orange: float
    red: float
    falling: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: What it shows.
        description: What to read off it, and what good looks like.
        queries: What is drawn.
        unit: Of the values, in Grafana's names.
        kind: How it is drawn.
        log: Whether the value axis is logarithmic.
        most: Upper end of the value axis, where there is a natural one.
        limits: Colours of the values, if there are values that are always bad.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    log: bool = False
    most: float | None = None
    limits: Limits | None = None


@dataclass(frozen=True)
class Dashboard:
    """One page of panels; with `alerts`, the alerts that fire come first."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    alerts: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: a mark across all panels.

    Attributes:
        name: What happened.
        expr: Not empty at the times when it did, in PromQL.
        colour: Of the marks.
        shown: Whether the marks are there before anybody asks for them.
    """

    name: str
    expr: str
    colour: str
    shown: bool = True


_S = '{instance=~"$server"}'
_BY = 'instance=~"$server"'
_RANGE = "[$__rate_interval]"


def _rate(metric: str, labels: str = _BY) -> str:
    return f"rate({metric}{{{labels}}}{_RANGE})"


def _quantiles(metric: str, *shares: float) -> tuple[Query, ...]:
    buckets = f"sum by (le) ({_rate(metric + '_bucket')})"
    return tuple(Query(f"histogram_quantile({share}, {buckets})", f"{100 * share:g} %") for share in shares)


def _number(title: str, description: str, expr: str, unit: str = "short", limits: Limits | None = None) -> Panel:
    return Panel(title, description, (Query(expr),), unit, Kind.NUMBER, limits=limits)


def _heatmap(title: str, description: str, metric: str) -> Panel:
    buckets = f"sum by (le) (increase({metric}_bucket{{{_BY}}}{_RANGE}))"
    return Panel(title, description, (Query(buckets, "{{le}}"),), "short", Kind.HEATMAP)


def _mean(metric: str) -> str:
    return f"sum({_rate(metric + '_sum')}) / sum({_rate(metric + '_count')})"


def _each_worker(top: str, bottom: str) -> str:
    return f"sum by (worker) ({_rate(top)}) / sum by (worker) ({_rate(bottom)})"


ALERTS = _number(
    "Alerts firing",
    "Alerts of this server that fire now. Good: 0. The list beside it names them and links to the runbook.",
    'count(ALERTS{alertstate="firing", alertname=~"Gem.*", instance=~"$server|"}) or vector(0)',
    limits=Limits(orange=1, red=1),
)

EVENTS = (
    Event("Server restarted", f"changes(process_start_time_seconds{_S}[1m]) > 0", "red"),
    Event("Server drains", f"gem_draining{_S} == 1", "orange"),
    Event("Evaluation", f"changes(gem_evaluation_loss{_S}[15s]) > 0", "blue", shown=False),  # there are many
)

TRAINING = Dashboard(
    "gem-training",
    "GEM / Training",
    "Does it learn, how fast, and how far is it?",
    (
        _number(
            "Accuracy",
            "On held-out data, from the evaluator's last report. Good: rising.",
            f"max(gem_evaluation_accuracy{_S})",
            "percentunit",
        ),
        _number("Training loss", "Smoothed over about 50 commits. Good: falling.", f"max(gem_training_loss{_S})"),
        _number(
            "Commits", "Applied to the central variable so far: its version. Good: rising.", f"max(gem_central_version{_S})"
        ),
        _number(
            "Commits per second",
            "Applied in the last minute. Good: steady; 0 when the run is done.",
            f'sum(rate(gem_commits_total{{{_BY}, outcome="applied"}}[1m]))',
        ),
        _number("Active workers", "Workers that hold a lease. Good: as many as were started.", f"sum(gem_active_workers{_S})"),
        _number(
            "Epoch", "The newest epoch that a shard was handed out of, counted from 1. Good: rising.", f"max(gem_epoch{_S}) + 1"
        ),
        Panel(
            "Loss",
            "Training loss is smoothed over about 50 commits; evaluation is on held-out data. Good: both fall and stay close. "
            "An evaluation loss that rises again while the training loss falls is overfitting; a training loss that jumps is "
            "a learning rate too high.",
            (Query(f"gem_training_loss{_S}", "training"), Query(f"gem_evaluation_loss{_S}", "evaluation")),
        ),
        Panel(
            "Accuracy over time",
            "Share of correct answers on held-out data, as the evaluator reports it. Good: rises, then levels off.",
            (Query(f"gem_evaluation_accuracy{_S}", "accuracy"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Commits per second, by outcome",
            "Good: nearly all applied. Repeated: answers were lost on the way and asked for again; harmless. Rejected: see the "
            "panel of errors on the server's dashboard.",
            (Query(f"sum by (outcome) ({_rate('gem_commits_total')})", "{{outcome}}"),),
        ),
        Panel(
            "Samples per second",
            "Samples in applied commits. Good: grows with the number of workers until the server or the machines are full.",
            (Query(f"sum({_rate('gem_samples_committed_total')})", "samples/s"),),
        ),
        Panel(
            "Active workers over time",
            "Workers that hold a lease, and worker processes that Prometheus reaches. Good: both the number that was started; "
            "more processes than leases are workers that start up or cannot join.",
            (
                Query(f"sum(gem_active_workers{_S})", "leases"),
                Query('sum(up{job="gem-worker"})', "processes that answer"),
            ),
        ),
        Panel(
            "Shards",
            "Pending: of the newest epoch, not handed out yet. Leased: in workers' hands. Completed: over all epochs. Good: "
            "completed rises evenly, leased is about the number of workers.",
            (Query(f"sum by (state) (gem_shards{_S})", "{{state}}"),),
        ),
        Panel(
            "Where a worker's step goes",
            "Mean seconds a step spends waiting for data, computing, and exchanging with the server. Good: computing is most "
            "of it. A large exchange means that the network or the server is full; large data, that loading is slow.",
            (
                Query(
                    f"sum by (phase) (rate(gem_worker_step_seconds_sum{_RANGE})) / "
                    f"sum by (phase) (rate(gem_worker_step_seconds_count{_RANGE}))",
                    "{{phase}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Loss across workers",
            "Lowest, median and highest loss of the workers' last batches. Good: close together. One that stays far above the "
            "others has other data, or bad data.",
            (
                Query("min(gem_worker_loss)", "lowest"),
                Query("quantile(0.5, gem_worker_loss)", "median"),
                Query("max(gem_worker_loss)", "highest"),
            ),
        ),
    ),
    alerts=True,
)

GEM = Dashboard(
    "gem-rule",
    "GEM / Scaling factor π",
    "What Gradient Energy Matching does to the commits. Empty for the rules that have no π.",
    (
        _heatmap(
            "π of all parameters",
            "How the scaling factor is spread over all parameters of all commits (Eq. 19). Good: a broad band. All at 0: "
            "commits have no effect; all at the top: the other workers hardly move the model.",
            "gem_pi",
        ),
        Panel(
            "Quantiles of π",
            "Over all parameters of the commits in each interval. Good: a mean of 1/n or more for n workers. The median "
            "falls as workers are added (the paper's Figure 3), and with dozens of them it is 0.",
            (*_quantiles("gem_pi", 0.1, 0.25, 0.5, 0.75, 0.9), Query(_mean("gem_pi"), "mean")),
        ),
        Panel(
            "π of each tensor",
            "Median per tensor (the paper's Figures 9 and 10), averaged over the commits that were scraped. Good: all in one "
            "range. A tensor at 0 is no longer trained.",
            (Query(f"avg by (tensor) (avg_over_time(gem_pi_tensor_median{_S}{_RANGE}))", "{{tensor}}"),),
        ),
        Panel(
            "Share of π at its bounds",
            "Parameters with π = 0 (the model has already moved at least as far as the proxy would) and π = π_max. Good: "
            "steady. The share at 0 grows with the workers (two thirds with 30, four fifths with 100); near 1 commits have no "
            "effect. Many at the maximum: gradients are nearly 0, or --pi-max is too low.",
            (Query(f"avg by (bound) (avg_over_time(gem_pi_clamped_ratio{_S}{_RANGE}))", "{{bound}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Energy of proxy and central variable",
            "½|κm|² (Eq. 15) and ½|θ − s|² (Eq. 16) of the commits that were scraped. GEM steers the second towards the first. "
            "Good: the two move together, and fall as training settles.",
            (
                Query(f"avg(avg_over_time(gem_proxy_energy{_S}{_RANGE}))", "proxy"),
                Query(f"avg(avg_over_time(gem_central_energy{_S}{_RANGE}))", "central variable"),
            ),
            log=True,
        ),
        Panel(
            "Central energy ÷ proxy energy",
            "How well the energies match. Good: of the order of 1. Far above 1: the workers together move the model further "
            "than the proxy would; π falls to counter it.",
            (
                Query(
                    f"avg(avg_over_time(gem_central_energy{_S}{_RANGE})) / avg(avg_over_time(gem_proxy_energy{_S}{_RANGE}))",
                    "central ÷ proxy",
                ),
            ),
            log=True,
            limits=Limits(orange=10, red=100),
        ),
    ),
)

STALENESS = Dashboard(
    "gem-staleness",
    "GEM / Staleness",
    "How old the gradients are when they arrive, and how much each worker counts.",
    (
        _heatmap(
            "Staleness of commits",
            "Commits that others had applied between a worker's pull and its own commit (Eq. 2). Good: one band around the "
            "number of workers less 1. A second band far above it is a slow worker.",
            "gem_commit_staleness",
        ),
        Panel(
            "Staleness against what is expected",
            "With n workers of equal speed the mean is n − 1. Good: mean and median on the dashed expectation; a 99 % far "
            "above it is a straggler.",
            (
                Query(f"clamp_min(sum(gem_active_workers{_S}) - 1, 0)", "expected: workers − 1", dashed=True),
                Query(_mean("gem_commit_staleness"), "mean"),
                *_quantiles("gem_commit_staleness", 0.5, 0.99),
            ),
        ),
        Panel(
            "Mean staleness of each worker",
            "Good: all alike. A worker far above the others is slow, or far away: its commits have little effect under GEM, "
            "and do harm under downpour.",
            (Query(_each_worker("gem_worker_staleness_total", "gem_worker_commits_total"), "{{worker}}"),),
        ),
        Panel(
            "Influence of each worker",
            "Share of what all commits amounted to: each counts as its mean scaling factor (π; 1 for downpour, 1/(τ+1) for "
            "adaptive). Good: equal shares.",
            (
                Query(
                    f"sum by (worker) ({_rate('gem_worker_influence_total')}) "
                    f"/ ignoring (worker) group_left sum({_rate('gem_worker_influence_total')})",
                    "{{worker}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Mean scaling factor of each worker",
            "What the rule made of the worker's commits. Good: all alike. Near 0: its gradients are too stale to matter.",
            (Query(_each_worker("gem_worker_influence_total", "gem_worker_commits_total"), "{{worker}}"),),
        ),
        Panel(
            "Commits per second of each worker",
            "Good: all alike, as the server gives everyone an equal turn; differences are the workers' own speed.",
            (Query(f"sum by (worker) ({_rate('gem_worker_commits_total')})", "{{worker}}"),),
        ),
        Panel(
            "Rejected commits of each worker",
            "Good: none. One worker alone has bad data, or another program than the others.",
            (Query(f"sum by (worker) (increase(gem_worker_rejected_total{_S}{_RANGE}))", "{{worker}}"),),
        ),
    ),
)

_APPLYING = f"sum({_rate('gem_commit_apply_seconds_sum')})"
_BUSY = Limits(orange=0.8, red=0.95)

SERVER = Dashboard(
    "gem-server",
    "GEM / Server",
    "Is the server the bottleneck, is there room, and would it survive a restart?",
    (
        _number(
            "Server answers",
            "Whether Prometheus reaches the server. Good: 1. At 0 nothing trains, and nothing else on this page is new.",
            f'min(up{{job="gem-server", {_BY}}})',
            limits=Limits(orange=1, red=1, falling=True),
        ),
        _number(
            "Time spent applying",
            "Share of the time in which a commit is being applied. Good: below 80 %. Near 100 %: the server is full.",
            _APPLYING,
            "percentunit",
            limits=_BUSY,
        ),
        _number(
            "Memory in use",
            "Share of --memory-limit. Good: below 80 %. At 100 % further workers are refused. Empty without a limit.",
            f"max(gem_memory_bytes{_S} / (gem_memory_limit_bytes{_S} > 0))",
            "percentunit",
            limits=Limits(orange=0.8, red=0.9),
        ),
        _number(
            "Commits rejected",
            "Share of the last 5 minutes' commits. Good: 0 %. The panel of rejected commits says why.",
            f'sum(rate(gem_commits_total{{{_BY}, outcome="rejected"}}[5m])) / (sum(rate(gem_commits_total{_S}[5m])) > 0)',
            "percentunit",
            limits=Limits(orange=0.001, red=0.01),
        ),
        _number(
            "Leases expired",
            "In the last 5 minutes: workers that fell silent. Good: 0.",
            f'sum(increase(gem_leases_ended_total{{{_BY}, reason="expired"}}[5m]))',
            limits=Limits(orange=1, red=5),
        ),
        _number(
            "In quarantine",
            "Workers that are kept out, for their gradients were refused again and again. Good: 0.",
            f"sum(gem_quarantined_workers{_S})",
            limits=Limits(orange=1, red=2),
        ),
        Panel(
            "Queue",
            "Commits that wait for their turn or have it. Good: mostly 0 or 1. Near the number of workers: the server is full.",
            (Query(f"sum(gem_commit_queue_length{_S})", "commits"),),
        ),
        Panel(
            "Share of time spent applying",
            "The update pass takes one commit at a time. Good: below 0.8. Near 1: more workers bring nothing more.",
            (Query(_APPLYING, "applying"),),
            "percentunit",
            most=1,
            limits=_BUSY,
        ),
        Panel(
            "Wait for a turn",
            "From a commit's last byte to the start of its arithmetic. Good: below the time of a worker's step.",
            _quantiles("gem_commit_wait_seconds", 0.5, 0.99),
            "s",
        ),
        Panel(
            "Time to apply a commit",
            "The arithmetic alone. Good: steady; it grows with the model only.",
            _quantiles("gem_commit_apply_seconds", 0.5, 0.99),
            "s",
        ),
        Panel(
            "Bytes per second",
            "Tensor frames received (gradients) and sent (θ). Good: both far below what the network carries.",
            (
                Query(f"sum({_rate('gem_received_bytes_total')})", "received"),
                Query(f"sum({_rate('gem_sent_bytes_total')})", "sent"),
            ),
            "Bps",
        ),
        Panel(
            "Leases that ended",
            "By reason. left: the worker was done or stopped. expired: it fell silent. replaced: it came back under its name. "
            "rolled_back: the server came back from an older checkpoint. quarantined: its gradients were refused. Good: none "
            "while training but left.",
            (
                Query(f"sum by (reason) (increase(gem_leases_ended_total{_S}{_RANGE}))", "{{reason}}"),
                Query(f"sum(gem_quarantined_workers{_S})", "in quarantine now", dashed=True),
            ),
        ),
        Panel(
            "Rejected commits, by error",
            "Good: none. NonFiniteGradient: training diverges. LeaseEnded: workers too slow to keep their lease. "
            "NormOutOfBounds: gradients far larger than the run's; the dashboard of staleness shows which worker sends them.",
            (
                Query(f"sum by (error) (increase(gem_commits_rejected_total{_S}{_RANGE}))", "{{error}}"),
                Query(f"sum(increase(gem_nonfinite_losses_total{_S}{_RANGE}))", "loss not finite"),
            ),
        ),
        Panel(
            "Memory for the model and the workers",
            "What the server holds, what it may hold at most, and what one more worker takes. Good: held stays below the "
            "limit by more than one worker; a worker without room is refused.",
            (
                Query(f"sum(gem_memory_bytes{_S})", "held"),
                Query(f"sum(gem_memory_limit_bytes{_S} > 0)", "limit"),
                Query(f"max(gem_worker_memory_bytes{_S})", "each worker"),
            ),
            "bytes",
            log=True,
        ),
        Panel(
            "Memory of the processes",
            "Resident memory: the server's process, and the largest and all worker processes. Good: flat once all have joined.",
            (
                Query(f"sum(process_resident_memory_bytes{_S})", "server"),
                Query('max(process_resident_memory_bytes{job="gem-worker"})', "largest worker"),
                Query('sum(process_resident_memory_bytes{job="gem-worker"})', "all workers"),
            ),
            "bytes",
            log=True,
        ),
        Panel(
            "Age of the last checkpoint",
            "Seconds since it was written. Good: a saw-tooth no higher than --checkpoint-interval while training; once the "
            "run is done and saved it just grows.",
            (Query(f"time() - max(gem_checkpoint_timestamp_seconds{_S})", "age"),),
            "s",
        ),
        Panel(
            "Commits since the last checkpoint",
            "What would be lost if the server died now. Good: a saw-tooth; 0 at the end.",
            (Query(f"max(gem_central_version{_S}) - max(gem_checkpoint_version{_S})", "commits"),),
        ),
    ),
    alerts=True,
)

DASHBOARDS = (TRAINING, GEM, STALENESS, SERVER)
