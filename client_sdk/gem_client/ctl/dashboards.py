"""What to watch in a run. The Grafana dashboards and the HTML report are both made of these panels.

In a query, `$server` stands for a regular expression that matches the servers' `instance` labels, and `$__rate_interval` for a
time that holds several scrapes. Grafana fills them in for the dashboards, and `gem_client.ctl.report` for the report.

The workers of a server have instances of their own. They are those with the same label `run` as the server, which
Prometheus's configuration gives to both. So several runs in one Prometheus do not mix. If neither has the label, all workers
match.
"""

from __future__ import annotations

from gem_client.ctl.panels import Dashboard, Event, Kind, Limits, Panel, Query

_S = '{instance=~"$server"}'
_BY = 'instance=~"$server"'
_RANGE = "[$__rate_interval]"
_SERVER_UP = f'up{{job="gem-server", {_BY}}}'
SAME_RUN = f"and on (run) {_SERVER_UP}"
_WORKERS = '{job="gem-worker"}'


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


def _of_workers(metric: str) -> str:
    """What the run's worker processes export themselves, in parentheses."""
    return f"({metric} {SAME_RUN})"


def _each_worker(top: str, bottom: str) -> str:
    return f"sum by (worker) ({_rate(top)}) / sum by (worker) ({_rate(bottom)})"


def _firing(labels: str) -> str:
    return f'ALERTS{{alertstate="firing", alertname=~"Gem.*", {labels}}}'


# If the server is absent, its alert has no instance, and no `run` if the rules watch every run.
_ABSENT, _ABSENT_UNNAMED = 'instance=""', 'instance="", run=""'

ALERTS = _number(
    "Alerts firing",
    "Alerts of this server that are firing now. Good: 0. The list beside this number names them and links to the runbook.",
    f"count({_firing(_BY)} or {_firing(_ABSENT)} and on (run) last_over_time({_SERVER_UP}[1d]) "
    f"or {_firing(_ABSENT_UNNAMED)}) or vector(0)",
    limits=Limits(orange=1, red=1),
)

# 1 min is the step in which Grafana looks for events, and holds two scrapes that are 30 s apart.
EVENTS = (
    Event("Server restarted", f"changes(process_start_time_seconds{_S}[1m]) > 0", "red"),
    Event("Server drains", f"gem_draining{_S} == 1", "orange"),
    Event("Evaluation", f"changes(gem_evaluation_loss{_S}[1m]) > 0", "blue", shown=False),  # there are many
)

TRAINING = Dashboard(
    "gem-training",
    "GEM / Training",
    "Does the model learn, how fast, and how far is the run?",
    (
        _number(
            "Accuracy",
            "On held-out data, from the evaluator's last report. Good: rising.",
            f"max(gem_evaluation_accuracy{_S})",
            "percentunit",
        ),
        _number("Training loss", "Smoothed over about 50 commits. Good: falling.", f"max(gem_training_loss{_S})"),
        _number(
            "Commits",
            "Commits applied so far: the version of the central variable. Good: rising.",
            f"max(gem_central_version{_S})",
        ),
        _number(
            "Commits per second",
            "Commits applied per second in the last minute. Good: steady; 0 when the run is done.",
            f'sum(rate(gem_commits_total{{{_BY}, outcome="applied"}}[1m]))',
        ),
        _number("Active workers", "Workers that hold a lease. Good: as many as were started.", f"sum(gem_active_workers{_S})"),
        _number(
            "Epoch", "The newest epoch of which a worker got a shard, counted from 1. Good: rising.", f"max(gem_epoch{_S}) + 1"
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
            "Good: nearly all applied. Repeated: a response was lost, so the worker sent the commit again; harmless. "
            "Rejected: the panel 'Rejected commits, by error' of the dashboard 'GEM / Server' has the reasons. "
            "Discarded: the rule ringmaster found the commit too stale.",
            (Query(f"sum by (outcome) ({_rate('gem_commits_total')})", "{{outcome}}"),),
        ),
        Panel(
            "Samples per second",
            "Samples in applied commits. Good: grows with the number of workers until the server or the machines are full.",
            (Query(f"sum({_rate('gem_samples_committed_total')})", "samples/s"),),
        ),
        Panel(
            "Active workers over time",
            "Workers that hold a lease, and worker processes that Prometheus reaches. Good: both equal the number started. "
            "If there are more processes than leases, some workers are starting or cannot join.",
            (
                Query(f"sum(gem_active_workers{_S})", "leases"),
                Query(f"sum{_of_workers('up' + _WORKERS)}", "reachable processes"),
            ),
        ),
        Panel(
            "Shards",
            "Pending: shards of the newest epoch that no worker has yet. Leased: shards that a worker has. Completed: finished "
            "shards of all epochs. Good: completed rises evenly, leased is about the number of workers.",
            (Query(f"sum by (state) (gem_shards{_S})", "{{state}}"),),
        ),
        Panel(
            "Where a worker's step goes",
            "Mean seconds of each phase of a step: data (waiting for a batch), compute, exchange (with the server). Good: "
            "compute is most of it. If exchange takes long, the network or the server is saturated. If data takes long, "
            "loading is slow.",
            (
                Query(
                    f"sum by (phase) {_of_workers(f'rate(gem_worker_step_seconds_sum{_RANGE})')} / "
                    f"sum by (phase) {_of_workers(f'rate(gem_worker_step_seconds_count{_RANGE})')}",
                    "{{phase}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Loss across workers",
            "Lowest, median and highest loss of the worker processes' last batches. Good: close together. A process that stays "
            "far above the others has different data, or bad data.",
            (
                Query(f"min{_of_workers('gem_worker_loss')}", "lowest"),
                Query(f"quantile(0.5, gem_worker_loss {SAME_RUN})", "median"),
                Query(f"max{_of_workers('gem_worker_loss')}", "highest"),
            ),
        ),
        Panel(
            "Learning rate of workers",
            "Lowest and highest learning rate of the worker processes' last steps: that of the server's schedule, or each "
            "worker's own if workers bring their optimizers. Good: close together, as all are equally far in their schedules.",
            (
                Query(f"min{_of_workers('gem_worker_learning_rate')}", "lowest"),
                Query(f"max{_of_workers('gem_worker_learning_rate')}", "highest"),
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
            "Histogram of the scaling factor over all parameters of all commits (Eq. 19). Good: a broad band. All at 0: "
            "commits have no effect. All at the maximum: the other workers hardly move the model.",
            "gem_pi",
        ),
        Panel(
            "Quantiles of π",
            "Over all parameters of the commits in each interval. Good: a mean of at least 1/n with n workers. The median "
            "falls as workers are added (the paper's Figure 3). With dozens of workers it is 0.",
            (*_quantiles("gem_pi", 0.1, 0.25, 0.5, 0.75, 0.9), Query(_mean("gem_pi"), "mean")),
        ),
        Panel(
            "π of each tensor",
            "Median over each tensor (the paper's Figures 9 and 10), averaged over the scraped commits. Good: all in one "
            "range. A tensor at 0 is no longer trained.",
            (Query(f"avg by (tensor) (avg_over_time(gem_pi_tensor_median{_S}{_RANGE}))", "{{tensor}}"),),
        ),
        Panel(
            "Share of π at its bounds",
            "Share of parameters with π = 0 (they have already moved at least as far as the proxy would move them), and with "
            "π = π_max. Good: steady. The share at 0 grows with the number of workers: two thirds with 30, four fifths with "
            "100. Near 100 % commits have no effect. Many at the maximum: gradients are nearly 0, or --pi-max is too low.",
            (Query(f"avg by (bound) (avg_over_time(gem_pi_clamped_ratio{_S}{_RANGE}))", "{{bound}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Energy of proxy and central variable",
            "Energy of the proxy, ½|κm|² (Eq. 15), and of the central variable, ½|θ − s|² (Eq. 16), of the scraped commits. "
            "GEM steers the second towards the first. Good: the two move together, and fall as training settles.",
            (
                Query(f"avg(avg_over_time(gem_proxy_energy{_S}{_RANGE}))", "proxy"),
                Query(f"avg(avg_over_time(gem_central_energy{_S}{_RANGE}))", "central variable"),
            ),
            log=True,
        ),
        Panel(
            "Central energy ÷ proxy energy",
            "How well the two energies match. Good: about 1. Far above 1: the workers together move the model further than "
            "the proxy would. π falls to counter it.",
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
    "How old the gradients are when they arrive, and how much influence each worker has.",
    (
        _heatmap(
            "Staleness of commits",
            "Commits that others had applied between a worker's pull and its own commit (Eq. 2). Good: one band around the "
            "number of workers less 1. A second band far above it is a slow worker.",
            "gem_commit_staleness",
        ),
        Panel(
            "Staleness against its expectation",
            "With n workers of equal speed the mean is n − 1. Good: mean and median near the dashed line. A 99 % quantile far "
            "above it means that a worker is slow.",
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
            "The worker's share of the sum of all scaling factors. A commit's scaling factor is its mean π under gem, 1 under "
            "downpour and 1/(τ+1) under adaptive. Good: equal shares.",
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
            "How strongly the rule applied the worker's commits. Good: all alike. Near 0: its gradients are too stale to "
            "matter.",
            (Query(_each_worker("gem_worker_influence_total", "gem_worker_commits_total"), "{{worker}}"),),
        ),
        Panel(
            "Commits per second of each worker",
            "Good: all alike. The server serves all workers equally, so differences come from the workers' own speed.",
            (Query(f"sum by (worker) ({_rate('gem_worker_commits_total')})", "{{worker}}"),),
        ),
        Panel(
            "Rejected commits of each worker",
            "Good: none. If only one worker has some, its data or its program differs from the others'.",
            (Query(f"sum by (worker) (increase(gem_worker_rejected_total{_S}{_RANGE}))", "{{worker}}"),),
        ),
    ),
)

_APPLYING = f"sum({_rate('gem_commit_apply_seconds_sum')})"
_BUSY = Limits(orange=0.8, red=0.95)

SERVER = Dashboard(
    "gem-server",
    "GEM / Server",
    "Is the server the bottleneck, does it have enough memory, and what would a crash lose?",
    (
        _number(
            "Server answers",
            "Whether Prometheus reaches the server. Good: 1. At 0 nothing trains, and the other panels are out of date.",
            f"min({_SERVER_UP})",
            limits=Limits(orange=1, red=1, falling=True),
        ),
        _number(
            "Time spent applying",
            "Share of the time in which a commit is being applied. Good: below 80 %. Near 100 %: the server is saturated.",
            _APPLYING,
            "percentunit",
            limits=_BUSY,
        ),
        _number(
            "Memory in use",
            "Share of --memory-limit. Good: below 80 %. At 100 % the server rejects further workers. Empty without a limit.",
            f"max(gem_memory_bytes{_S} / (gem_memory_limit_bytes{_S} > 0))",
            "percentunit",
            limits=Limits(orange=0.8, red=0.9),
        ),
        _number(
            "Commits rejected",
            "Share of the commits of the last 5 minutes. Good: 0 %. The panel of rejected commits shows the reasons.",
            f'sum(rate(gem_commits_total{{{_BY}, outcome="rejected"}}[5m])) / (sum(rate(gem_commits_total{_S}[5m])) > 0)',
            "percentunit",
            limits=Limits(orange=0.001, red=0.01),
        ),
        _number(
            "Leases expired",
            "Workers in the last 5 minutes that stopped renewing their lease. Good: 0.",
            f'sum(increase(gem_leases_ended_total{{{_BY}, reason="expired"}}[5m]))',
            limits=Limits(orange=1, red=5),
        ),
        _number(
            "In quarantine",
            "Workers that may not train because too many of their gradients in a row were rejected. Good: 0.",
            f"sum(gem_quarantined_workers{_S})",
            limits=Limits(orange=1, red=2),
        ),
        Panel(
            "Queue",
            "Commits that wait or are being applied. Good: mostly 0 or 1. Near the number of workers: the server is saturated.",
            (Query(f"sum(gem_commit_queue_length{_S})", "commits"),),
        ),
        Panel(
            "Share of time spent applying",
            "The server applies one commit at a time. Good: below 0.8. Near 1: more workers bring no more commits.",
            (Query(_APPLYING, "applying"),),
            "percentunit",
            most=1,
            limits=_BUSY,
        ),
        Panel(
            "Wait before a commit is applied",
            "Time from a commit's last byte until the server begins to apply it. Good: less than a worker's step takes.",
            _quantiles("gem_commit_wait_seconds", 0.5, 0.99),
            "s",
        ),
        Panel(
            "Time to apply a commit",
            "Time that the update rule takes for one commit. Good: steady. It depends only on the size of the model.",
            _quantiles("gem_commit_apply_seconds", 0.5, 0.99),
            "s",
        ),
        Panel(
            "Bytes per second",
            "Tensor data received (gradients) and sent (θ). Good: both far below the capacity of the network.",
            (
                Query(f"sum({_rate('gem_received_bytes_total')})", "received"),
                Query(f"sum({_rate('gem_sent_bytes_total')})", "sent"),
            ),
            "Bps",
        ),
        Panel(
            "Commits by transport",
            "Commits per second that arrived on a lane (memory: shared memory; tcp; tls: TCP, encrypted) and over gRPC, which "
            "is slower. Good: no grpc, unless a client has no lane. A worker that can't open a lane says why in its log.",
            (Query(f"sum by (transport) ({_rate('gem_commits_received_total')})", "{{transport}}"),),
        ),
        Panel(
            "Leases that ended",
            "By reason. left: the worker finished or was stopped. expired: it stopped renewing its lease. replaced: a worker "
            "of the same name registered. rolled_back: the server resumed from an older checkpoint. quarantined: its "
            "gradients were rejected. Good: while training, none except left.",
            (
                Query(f"sum by (reason) (increase(gem_leases_ended_total{_S}{_RANGE}))", "{{reason}}"),
                Query(f"sum(gem_quarantined_workers{_S})", "in quarantine now", dashed=True),
            ),
        ),
        Panel(
            "Rejected commits, by error",
            "Good: none. NonFiniteGradient: a gradient with NaN or infinity; training diverges. LeaseEnded: the worker was "
            "silent for longer than its lease. NormOutOfBounds: a gradient far larger than the run's others. The dashboard "
            "'GEM / Staleness' shows which worker sends them.",
            (
                Query(f"sum by (error) (increase(gem_commits_rejected_total{_S}{_RANGE}))", "{{error}}"),
                Query(f"sum(increase(gem_nonfinite_losses_total{_S}{_RANGE}))", "loss not finite"),
            ),
        ),
        Panel(
            "Memory for the model and the workers",
            "What the server holds, its limit, and what one worker needs at most. Good: held stays below the limit by more "
            "than one worker. The server rejects a worker for which it has no memory.",
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
            "Resident memory of the server's process, of the largest worker process, and of all worker processes together. "
            "Good: flat once all workers have joined.",
            (
                Query(f"sum(process_resident_memory_bytes{_S})", "server"),
                Query(f"max{_of_workers('process_resident_memory_bytes' + _WORKERS)}", "largest worker"),
                Query(f"sum{_of_workers('process_resident_memory_bytes' + _WORKERS)}", "all workers"),
            ),
            "bytes",
            log=True,
        ),
        Panel(
            "Age of the last checkpoint",
            "Time since the last checkpoint was written. Good: while training, a saw-tooth no higher than "
            "--checkpoint-interval. After the run it keeps growing.",
            (Query(f"time() - max(gem_checkpoint_timestamp_seconds{_S})", "age"),),
            "s",
        ),
        Panel(
            "Commits since the last checkpoint",
            "Commits that would be lost if the server crashed now; with --durability log none are. Good: a saw-tooth; 0 at the "
            "end.",
            (Query(f"max(gem_central_version{_S}) - max(gem_checkpoint_version{_S})", "commits"),),
        ),
    ),
    alerts=True,
)

DASHBOARDS = (TRAINING, GEM, STALENESS, SERVER)
