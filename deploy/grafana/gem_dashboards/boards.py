"""What to watch in a run: Grafana's dashboards are made of these panels.

`queries` says how a query names the servers and the workers of a run.
"""

from __future__ import annotations

from gem_dashboards.panels import Dashboard, Event, Limits, Panel, Query
from gem_dashboards.queries import (
    LEADER,
    OF_LEADER,
    OF_RUN,
    ONCE_OF_RUN,
    SAME_RUN,
    SERVER_UP,
    WINDOW,
    WORKERS,
    all_of,
    by_label,
    each_worker,
    heatmap,
    mean,
    number,
    of_workers,
    quantiles,
    rate,
    rate_of_all,
)
from gem_dashboards.range_board import RANGES


def _firing(labels: str = "") -> str:
    return f'ALERTS{{alertstate="firing", alertname=~"Gem.*"{labels}}}'


# If a server is absent, its alert has no instance, and no `run` if the rules watch every run.
_ABSENT, _ABSENT_UNNAMED = ', instance=""', ', instance="", run=""'

ALERTS = number(
    "Alerts firing",
    "Alerts of this run's servers that fire now. Good: 0. The list beside names them; docs/troubleshooting.md explains each.",
    f"count({_firing()} {ONCE_OF_RUN} or {_firing(_ABSENT)} and on (run) last_over_time({SERVER_UP}[1d]) "
    f"or {_firing(_ABSENT_UNNAMED)}) or vector(0)",
    limits=Limits(orange=1, red=1),
)

# 1 min is the step in which Grafana looks for events, and holds two scrapes that are 30 s apart.
EVENTS = (
    Event("Server restarted", f"changes(process_start_time_seconds[1m]) > 0 {OF_RUN}", "red"),
    Event("Run complete", f"changes(gem_run_complete{LEADER}[1m]) > 0", "green"),
    Event("Server drains", f"gem_draining == 1 {OF_RUN}", "orange"),
    Event("Evaluation", f"changes(gem_evaluation_loss{LEADER}[1m]) > 0", "blue", shown=False),  # there are many
)

TRAINING = Dashboard(
    "gem-training",
    "GEM / Training",
    "Does the model learn, how fast, and how far is the run?",
    (
        number(
            "Accuracy",
            "On held-out data, from the evaluator's last report. Good: rising.",
            f"max(gem_evaluation_accuracy{LEADER})",
            "percentunit",
        ),
        number("Training loss", "Smoothed over about 50 commits. Good: falling.", f"max(gem_training_loss{LEADER})"),
        number(
            "Commits",
            "Commits applied so far: the version of the central variable. Good: rising.",
            f"max(gem_central_version{LEADER})",
        ),
        number(
            "Commits per second",
            "Commits applied per second in the last minute. Good: steady; 0 when the run is done.",
            f'sum(rate(gem_commits_total{{{OF_LEADER}, outcome="applied"}}[1m]))',
        ),
        number(
            "Active workers", "Workers that hold a lease. Good: as many as were started.", f"sum(gem_active_workers{LEADER})"
        ),
        number(
            "Epoch",
            "The newest epoch of which a worker got a shard, counted from 1. Good: rising.",
            f"max(gem_epoch{LEADER}) + 1",
        ),
        Panel(
            "Loss",
            "Training loss is smoothed over about 50 commits; evaluation is on held-out data. Good: both fall and stay close. "
            "An evaluation loss that rises again while the training loss falls is overfitting; a training loss that jumps is "
            "a learning rate too high.",
            (Query(f"gem_training_loss{LEADER}", "training"), Query(f"gem_evaluation_loss{LEADER}", "evaluation")),
        ),
        Panel(
            "Accuracy over time",
            "Share of correct answers on held-out data, as the evaluator reports it. Good: rises, then levels off.",
            (Query(f"gem_evaluation_accuracy{LEADER}", "accuracy"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Commits per second, by outcome",
            "Good: nearly all applied. Repeated: a response was lost, so the worker sent the commit again; harmless. "
            "Rejected: the panel 'Rejected commits, by error' of the dashboard 'GEM / Server' has the reasons. "
            "Discarded: the rule ringmaster found the commit too stale.",
            (Query(f"sum by (outcome) ({rate('gem_commits_total')})", "{{outcome}}"),),
        ),
        Panel(
            "Samples per second",
            "Samples in applied commits. Good: grows with the number of workers until the server or the machines are full.",
            (Query(f"sum({rate('gem_samples_committed_total')})", "samples/s"),),
        ),
        Panel(
            "Active workers over time",
            "Workers that hold a lease, and worker processes that Prometheus reaches. Good: both equal the number started. "
            "If there are more processes than leases, some workers are starting or cannot join.",
            (
                Query(f"sum(gem_active_workers{LEADER})", "leases"),
                Query(f"sum{of_workers('up' + WORKERS)}", "reachable processes"),
            ),
        ),
        Panel(
            "Shards",
            "Pending: shards of the newest epoch that no worker has yet. Leased: shards that a worker has. Completed: finished "
            "shards of all epochs. Good: completed rises evenly, leased is about the number of workers.",
            (Query(f"sum by (state) (gem_shards{LEADER})", "{{state}}"),),
        ),
        Panel(
            "Where a worker's step goes",
            "Mean seconds of each phase of a step: data (waiting for a batch), compute, exchange (with the server). Good: "
            "compute is most of it. If exchange takes long, the network or the server is saturated. If data takes long, "
            "loading is slow.",
            (
                Query(
                    f"sum by (phase) {of_workers(f'rate(gem_worker_step_seconds_sum{WINDOW})')} / "
                    f"sum by (phase) {of_workers(f'rate(gem_worker_step_seconds_count{WINDOW})')}",
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
                Query(f"min{of_workers('gem_worker_loss')}", "lowest"),
                Query(f"quantile(0.5, gem_worker_loss {SAME_RUN})", "median"),
                Query(f"max{of_workers('gem_worker_loss')}", "highest"),
            ),
        ),
        Panel(
            "Learning rate of workers",
            "Lowest and highest learning rate of the worker processes' last steps: that of the server's schedule, or each "
            "worker's own if workers bring their optimizers. Good: close together, as all are equally far in their schedules.",
            (
                Query(f"min{of_workers('gem_worker_learning_rate')}", "lowest"),
                Query(f"max{of_workers('gem_worker_learning_rate')}", "highest"),
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
        heatmap(
            "π of all parameters",
            "π is the factor by which the server multiplies a commit's step, for each parameter. The further θ "
            "is from the point on which the worker computed its gradient, the smaller is π. Good: a broad band. All at 0: "
            "commits have no effect. The maximum is 1 with an optimizer on the server, the whole step, and 5 with SGD.",
            f"increase(gem_pi_bucket{WINDOW}) {OF_RUN}",
        ),
        Panel(
            "Quantiles of π",
            "Over all parameters of the commits in each interval. Good: a mean of at least 1/n with n workers. The median "
            "falls as workers are added (the paper's Figure 3). With dozens of workers it is 0. With SGD and few workers it "
            "may rise above 1 as training settles.",
            (
                *quantiles(rate_of_all("gem_pi_bucket"), 0.1, 0.25, 0.5, 0.75, 0.9),
                Query(mean("gem_pi", rate_of_all), "mean"),
            ),
        ),
        Panel(
            "π of each tensor",
            "Median over each tensor (the paper's Figures 9 and 10), averaged over the scraped commits. Good: all in one "
            "range. A tensor at 0 is no longer trained.",
            (Query(f"avg by (tensor) (avg_over_time(gem_pi_tensor_median{WINDOW}) {OF_RUN})", "{{tensor}}"),),
        ),
        Panel(
            "Share of π at its bounds",
            "Share of parameters with π = 0 and with π = π_max. Good: not nearly all at 0, where commits have no effect. "
            "That share grows with the number of workers: two thirds with 30, four fifths with 100. Many at the "
            "maximum are normal with one worker, and with SGD as gradients shrink.",
            (Query(f"avg by (bound) (avg_over_time(gem_pi_clamped_ratio{WINDOW}) {OF_RUN})", "{{bound}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Energy of proxy and central variable",
            "Energy of the proxy, ½|κm|², and of the central variable, ½|θ − s|², of the scraped commits. "
            "GEM steers the second towards the first. With another optimizer than SGD the second is the movement that was not "
            "foreseen. Good: the two move together, and fall as training settles.",
            (
                Query(f"sum(avg_over_time(gem_proxy_energy{WINDOW}) {OF_RUN})", "proxy"),
                Query(f"sum(avg_over_time(gem_central_energy{WINDOW}) {OF_RUN})", "central variable"),
            ),
            log=True,
        ),
        Panel(
            "Central energy ÷ proxy energy",
            "How well the two energies match. Good: about 1; with another optimizer than SGD below 1: predictions hold. Far "
            "above 1: the workers together move the model further than the proxy would. π falls to counter it.",
            (
                Query(
                    f"sum(avg_over_time(gem_central_energy{WINDOW}) {OF_RUN}) "
                    f"/ sum(avg_over_time(gem_proxy_energy{WINDOW}) {OF_RUN})",
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
        heatmap(
            "Staleness of commits",
            "Commits that others had applied between a worker's pull and its own commit. Good: one band around the "
            "number of workers less 1. A second band far above it is a slow worker.",
            f"increase(gem_commit_staleness_bucket{LEADER}{WINDOW})",
        ),
        Panel(
            "Staleness against its expectation",
            "With n workers of equal speed the mean is n − 1. Good: mean and median near the dashed line. A 99 % quantile far "
            "above it means that a worker is slow.",
            (
                Query(f"clamp_min(sum(gem_active_workers{LEADER}) - 1, 0)", "expected: workers − 1", dashed=True),
                Query(mean("gem_commit_staleness"), "mean"),
                *quantiles(rate("gem_commit_staleness_bucket"), 0.5, 0.99),
            ),
        ),
        Panel(
            "Mean staleness of each worker",
            "Good: all alike. A worker far above the others is slow, or far away: its commits have little effect under GEM, "
            "and do harm under downpour.",
            (Query(each_worker("gem_worker_staleness_total", "gem_worker_commits_total"), "{{worker}}"),),
        ),
        Panel(
            "Influence of each worker",
            "The worker's share of the sum of all scaling factors. A commit's scaling factor is its mean π under gem, 1 under "
            "downpour and 1/(τ+1) under adaptive. Good: equal shares.",
            (
                Query(
                    f"sum by (worker) ({rate('gem_worker_influence_total')}) "
                    f"/ ignoring (worker) group_left sum({rate('gem_worker_influence_total')})",
                    "{{worker}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Mean scaling factor of each worker",
            "How strongly the rule applied the worker's commits. Good: all alike. Near 0: its gradients are too stale to "
            "matter.",
            (Query(each_worker("gem_worker_influence_total", "gem_worker_commits_total"), "{{worker}}"),),
        ),
        Panel(
            "Commits per second of each worker",
            "Good: all alike. The server serves all workers equally, so differences come from the workers' own speed.",
            (Query(f"sum by (worker) ({rate('gem_worker_commits_total')})", "{{worker}}"),),
        ),
        Panel(
            "Pace of each worker",
            "Seconds that a whole batch takes the worker, from a reply to its next commit. Good: all alike; or shares of a "
            "batch that make up for it.",
            (Query(f"max by (worker) (gem_worker_pace_seconds{LEADER})", "{{worker}}"),),
            "s",
        ),
        Panel(
            "Batch share of each worker",
            "The share of a whole batch that the worker's gradients have, so that all take about as long as the fastest "
            "(smallest_share). Good: 1 for the fastest, and steady. 1 for all if smallest_share is 1.",
            (Query(f"max by (worker) (gem_worker_batch_share{LEADER})", "{{worker}}"),),
        ),
        Panel(
            "Rejected commits of each worker",
            "Good: none. If only one worker has some, its data or its program differs from the others'. Of several "
            "servers: at the one that rejected most.",
            (Query(f"max by (worker) (increase(gem_worker_rejected_total{WINDOW}) {OF_RUN})", "{{worker}}"),),
        ),
    ),
)

_APPLYING = f"max({rate_of_all('gem_commit_apply_seconds_sum')})"
_BUSY = Limits(orange=0.8, red=0.95)

SERVER = Dashboard(
    "gem-server",
    "GEM / Server",
    "Is the server the bottleneck, does it have enough memory, and what would a crash lose? Of several servers, "
    "it shows the sum, or the worst; 'GEM / Ranges' shows each.",
    (
        number(
            "Server answers",
            "Whether Prometheus reaches the server and, of several, all of them. Good: 1. At 0 nothing trains, and the other "
            "panels are out of date.",
            f'min({SERVER_UP} or up{{job="gem-server"}} {ONCE_OF_RUN})',
            limits=Limits(orange=1, red=1, falling=True),
        ),
        number(
            "Time spent applying",
            "Share of the time in which a commit is being applied. Good: below 80 %. Near 100 %: the server is saturated.",
            _APPLYING,
            "percentunit",
            limits=_BUSY,
        ),
        number(
            "Memory in use",
            "Share of memory_limit. Good: below 80 %. At 100 % the server rejects further workers. Empty without a limit.",
            f"max(gem_memory_bytes / (gem_memory_limit_bytes > 0) {OF_RUN})",
            "percentunit",
            limits=Limits(orange=0.8, red=0.9),
        ),
        number(
            "Commits rejected",
            "Share of the commits of the last 5 minutes. Good: 0 %. The panel of rejected commits shows the reasons.",
            f'max(sum by (instance) (rate(gem_commits_total{{outcome="rejected"}}[5m]) {OF_RUN}) '
            f"/ (sum by (instance) (rate(gem_commits_total[5m]) {OF_RUN}) > 0))",
            "percentunit",
            limits=Limits(orange=0.001, red=0.01),
        ),
        number(
            "Leases expired",
            "Workers in the last 5 minutes that stopped renewing their lease. Good: 0.",
            f'max(increase(gem_leases_ended_total{{reason="expired"}}[5m]) {OF_RUN})',
            limits=Limits(orange=1, red=5),
        ),
        number(
            "In quarantine",
            "Workers that may not train because too many of their gradients in a row were rejected. Good: 0.",
            f"max({all_of('gem_quarantined_workers')})",
            limits=Limits(orange=1, red=2),
        ),
        Panel(
            "Queue",
            "Commits that wait or are being applied. Good: mostly 0 or 1. Near the number of workers: the server is saturated. "
            "Of several servers: the longest queue. Gradients that wait for memory. Good: 0; else memory_limit is too small.",
            (
                Query(f"max({all_of('gem_commit_queue_length')})", "commits"),
                Query(f"max({all_of('gem_uploads_waiting_for_memory')})", "gradients that wait for memory"),
            ),
        ),
        Panel(
            "Share of time spent applying",
            "The server applies one commit at a time. Good: below 0.8. Near 1: more workers bring no more commits. Of several "
            "servers: the busiest.",
            (Query(_APPLYING, "applying"),),
            "percentunit",
            most=1,
            limits=_BUSY,
        ),
        Panel(
            "Wait before a commit is applied",
            "Time from a commit's last byte until the server begins to apply it. Good: less than a worker's step takes.",
            quantiles(rate_of_all("gem_commit_wait_seconds_bucket"), 0.5, 0.99),
            "s",
        ),
        Panel(
            "Time that replies are held",
            "Time that a reply waits for other workers' commits, in a run's first rounds if `reply_wait` is above 0. Good: "
            "at most that share of a worker's step; 0 later. Time of calls does not include it.",
            quantiles(rate_of_all("gem_reply_wait_seconds_bucket"), 0.5, 0.99),
            "s",
        ),
        Panel(
            "Time to apply a commit",
            "Time that the update rule takes for one commit. Good: steady. It depends only on the size of the model.",
            quantiles(rate_of_all("gem_commit_apply_seconds_bucket"), 0.5, 0.99),
            "s",
        ),
        Panel(
            "Lag of the event loop",
            "How late the thread that serves all calls except commits on lanes does what is due. Good: below 20 ms.",
            quantiles(rate_of_all("gem_event_loop_lag_seconds_bucket"), 0.5, 0.99),
            "s",
        ),
        Panel(
            "Time of calls, by method",
            "Of half of the calls, and of 99 of 100. Commit: from a commit's header until θ is sent, also on a lane. Pull: "
            "with the wait for the first θ. Good: steady, and below 20 ms if a call moves no tensors. If all rise together, "
            "the event loop is late. Of several servers: all together.",
            by_label("method", "gem_rpc_seconds", only=" >= 0"),
            "s",
            log=True,
        ),
        Panel(
            "Calls that failed, by method and error",
            "Good: none but a few LeaseEnded. cancelled: the client has gone, or gave up waiting (timeout). Overloaded, "
            "Draining, Superseded: the client tries again. internal: a fault of the server, which its log has. Of several "
            "servers: at the one where most failed.",
            (Query(f"max by (method, error) (increase(gem_rpc_errors_total{WINDOW}) {OF_RUN})", "{{method}}: {{error}}"),),
        ),
        Panel(
            "Bytes per second",
            "Tensor data received (gradients) and sent (θ). Good: both far below the capacity of the network.",
            (
                Query(f"sum({rate_of_all('gem_received_bytes_total')})", "received"),
                Query(f"sum({rate_of_all('gem_sent_bytes_total')})", "sent"),
            ),
            "Bps",
        ),
        Panel(
            "Time on the network",
            "Of half of the commits, and of 99 of 100. up: from a gradient's first byte, once it is its turn, to its last. "
            "down: until the system has taken all of θ. turn: the wait before, as large tensors go one at a time. Good: up and "
            "down near their bytes ÷ bandwidth; turns grow with the number of workers. If 99 % is far above 50 %, packets are "
            "lost, or a machine is slow. Of several servers: all together.",
            (
                *by_label("direction", "gem_commit_wire_seconds", ""),
                *by_label("direction", "gem_commit_turn_wait_seconds", "turn, "),
            ),
            "s",
            log=True,
        ),
        Panel(
            "Commits by transport",
            "Commits per second that arrived on a lane (memory: shared memory; tcp; tls: TCP, encrypted) and over gRPC, which "
            "is slower. Good: no grpc, unless a client has no lane. A worker that can't open a lane says why in its log.",
            (Query(f"sum by (transport) ({rate('gem_commits_received_total')})", "{{transport}}"),),
        ),
        Panel(
            "Leases that ended",
            "By reason. left: the worker finished or was stopped. expired: it stopped renewing its lease. replaced: a worker "
            "of the same name registered. stalled: it made no progress. rolled_back: the server resumed from an older "
            "checkpoint. quarantined: its gradients were rejected. Good: while training, none except left.",
            (
                Query(f"sum by (reason) (increase(gem_leases_ended_total{LEADER}{WINDOW}))", "{{reason}}"),
                Query(f"max({all_of('gem_quarantined_workers')})", "in quarantine now", dashed=True),
            ),
        ),
        Panel(
            "Rejected commits, by error",
            "Good: none. NonFiniteGradient: a gradient with NaN or infinity; training diverges. LeaseEnded: the worker was "
            "silent for longer than its lease. NormOutOfBounds: a gradient far larger than the run's others. The dashboard "
            "'GEM / Staleness' shows which worker sends them. Of several servers: at the one that rejected most.",
            (
                Query(f"max by (error) (increase(gem_commits_rejected_total{WINDOW}) {OF_RUN})", "{{error}}"),
                Query(f"sum(increase(gem_nonfinite_losses_total{LEADER}{WINDOW}))", "loss not finite"),
            ),
        ),
        Panel(
            "Memory for the model and the workers",
            "What the server holds, its limit, and what one worker needs at most. Good: held stays below the limit by more "
            "than one worker. The server rejects a worker for which it has no memory. Of several servers: the sums.",
            (
                Query(f"sum({all_of('gem_memory_bytes')})", "held"),
                Query(f"sum(gem_memory_limit_bytes > 0 {OF_RUN})", "limit"),
                Query(f"sum({all_of('gem_worker_memory_bytes')})", "each worker"),
            ),
            "bytes",
            log=True,
        ),
        Panel(
            "Memory of the processes",
            "Resident memory of the server's process, of the largest worker process, and of all worker processes together. "
            "Good: flat once all workers have joined.",
            (
                Query(f"sum({all_of('process_resident_memory_bytes')})", "server"),
                Query(f"max{of_workers('process_resident_memory_bytes' + WORKERS)}", "largest worker"),
                Query(f"sum{of_workers('process_resident_memory_bytes' + WORKERS)}", "all workers"),
            ),
            "bytes",
            log=True,
        ),
        Panel(
            "Age of the last checkpoint",
            "Time since the last checkpoint was written. Good: while training, a saw-tooth no higher than "
            "checkpoint_interval. After the run it keeps growing.",
            (Query(f"time() - min({all_of('gem_checkpoint_timestamp_seconds')})", "age"),),
            "s",
        ),
        Panel(
            "Commits since the last checkpoint",
            "Commits that would be lost if the server crashed now; with --durability log none are. Good: a saw-tooth; 0 at the "
            "end.",
            (Query(f"max(gem_central_version - gem_checkpoint_version {OF_RUN})", "commits"),),
        ),
    ),
    alerts=True,
)

DASHBOARDS = (TRAINING, GEM, STALENESS, SERVER, RANGES)
