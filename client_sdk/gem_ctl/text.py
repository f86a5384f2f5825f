"""Formats a status and its parts, for `gem-ctl status`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gem_api.errors import GemError, ServerUnavailable
from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, Hyperparameters
from gem_api.named_settings import written
from gem_api.process.printable import printable
from gem_api.schedule import Schedule
from gem_api.v1 import training_pb2 as pb

from gem_ctl.columns import fitted

_SPARKS = 58  # characters of a curve at most, beside the label and the value that it ends with
_BEFORE_SPARKS = 22
_BARS = "▁▂▃▄▅▆▇"  # not the full block: it would touch the line above
_WORKER_COLUMNS = (
    "worker", "commits", "staleness", "median π", "loss", "pace", "share", "waited", "shards", "rejected", "via", "lease",
)  # fmt: skip
# Left out on a narrow terminal, in this order.
_SPARE = ("waited", "shards", "via", "lease", "rejected", "pace", "share", "loss", "staleness")


def status(run: pb.GetStatusResponse, ranges: Sequence[str] = (), width: int = 80) -> str:
    """Formats a whole status for people. `ranges` are lines about all ranges, if several servers hold the model. Curves and
    the rows of workers are at most `width` wide."""
    lines = [printable(f"{label:<11} {value}") for label, value in _overview(run, max(1, min(_SPARKS, width - _BEFORE_SPARKS)))]
    lines += ["", *map(printable, ranges)] if ranges else []
    if run.workers:
        rows = [_WORKER_COLUMNS, *([printable(cell) for cell in _worker(worker)] for worker in run.workers)]
        lines += ["", *fitted(rows, width, spare=_SPARE)]
    return "\n".join(lines)


def _overview(run: pb.GetStatusResponse, sparks: int) -> list[tuple[str, str]]:
    """The status of the run as a whole, by label."""
    settings, shards = Hyperparameters.from_message(run.hyperparameters), run.shards
    # Momentum is the proxy's, which the steps of other optimizers do without; workers' own optimizers have their own rates.
    eta = learning_rate(run, settings)
    rates = {"sgd": f"{eta}, momentum {settings.momentum}, ", "worker": ""}
    rate = rates.get(settings.optimizer, f"{eta}, ") + f"batch {settings.batch_size}"
    return [
        ("run", f"{run.run_id}, {state(run)}, up {duration(run.uptime_seconds)}"),
        *([("stalled", stall(run.stall))] if run.HasField("stall") else []),
        *([("begins", start(run))] if run.HasField("start") else []),
        ("rule", f"{settings.rule}, {rate}"),
        *([] if run.parameter_count else [("settings", "the first worker may bring an optimizer, its rate and a schedule")]),
        *special(settings).items(),
        *([("range", place(run))] if run.range_count > 1 else []),
        ("version", f"{run.version} ({counts(run.commits)})"),
        ("model", f"{run.parameter_count} parameters, memory {memory(run)}"),
        ("commits/s", _with_curve(optional(run, "commits_per_second", ".1f"), run.curves.commits_per_second, sparks)),
        ("staleness", _with_curve(f"{run.staleness:.1f}", run.curves.staleness, sparks)),
        ("median π", _with_curve(optional(run, "pi_median", ".3f"), run.curves.pi_median, sparks)),
        ("loss", _with_curve(optional(run, "training_loss", ".4f"), run.curves.loss, sparks)),
        ("evaluation", evaluation(run)),
        ("shards", f"{epoch(shards)}: {shards.pending} pending, {shards.leased} leased, {shards.completed} completed"),
        ("checkpoint", checkpoint(run)),
        ("queue", f"{run.queue_length}"),
        ("commits via", transports(run)),
        ("leases", f"{run.worker_count} live; ended: {counts(run.leases_ended) or 'none'}"),
    ]


def learning_rate(run: pb.GetStatusResponse, settings: Hyperparameters) -> str:
    """The learning rate that is set, and the one that the schedule has made of it, if that is another."""
    given, now = settings.learning_rate, known(run, "learning_rate")
    differs = now is not None and not math.isclose(now, given, rel_tol=1e-4)
    return f"learning rate {given}, now {now:.4g}" if differs else f"learning rate {given}"


def _with_curve(value: str, curve: Sequence[float], sparks: int) -> str:
    """A value, and how it came to be since the run's begin, in at most `sparks` characters."""
    every = -(-len(curve) // sparks) or 1
    shown = [None if math.isnan(one) else one for one in curve[(len(curve) - 1) % every :: every]]
    return f"{value:<9} {sparkline(shown)}".rstrip()


def place(run: pb.GetStatusResponse) -> str:
    """The range of the model that a server of several holds."""
    where = "this server leads" if run.range_index == 0 else "ask the server of range 0 for the whole run"
    return f"{run.range_index} of {run.range_count}: {where}"


def _worker(worker: pb.WorkerStatus) -> tuple[str, ...]:
    return (
        worker.name,
        f"{worker.commits}",
        f"{worker.staleness}",
        optional(worker, "pi_median", ".3f"),
        optional(worker, "loss", ".4f"),
        f"{worker.pace_seconds:.3g} s" if worker.pace_seconds else "–",
        f"{worker.batch_share:.3g}" if worker.batch_share else "–",
        f"{worker.waited_seconds:.3g} s" if worker.waited_seconds else "–",
        f"{worker.shards}",
        f"{worker.rejected}",
        via(worker),
        f"{worker.lease_remaining_seconds:.0f} s",
    )


def via(worker: pb.WorkerStatus) -> str:
    """The transport of a worker's last commit: a lane (memory, tcp or tls) or grpc; a dash before the first."""
    return worker.transport or "–"


def transports(run: pb.GetStatusResponse) -> str:
    """The transports of the workers' last commits, and how many came so; a dash before the first."""
    return counts(Counter(worker.transport for worker in run.workers if worker.transport)) or "–"


def counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items()))


def optional(message: Any, field: str, format_spec: str) -> str:
    return format(getattr(message, field), format_spec) if message.HasField(field) else "–"


def known(message: Any, field: str) -> float | None:
    """An optional field's value; None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def error(failure: GemError) -> str:
    """The error's message, with its type unless the message says enough."""
    return str(failure) if isinstance(failure, ServerUnavailable) else f"{type(failure).__name__}: {failure}"


def state(status: pb.GetStatusResponse) -> str:
    if status.state not in pb.RunState.values():
        return f"state {status.state}"  # of a newer server
    return pb.RunState.Name(status.state).removeprefix("RUN_STATE_").lower()


def stall(stalled: pb.Stall) -> str:
    """A line about a stall: since when no commit is acknowledged, the room that the log needs on its disk, and why."""
    needs = f"the log needs {size(stalled.needed_bytes)}, " if stalled.HasField("needed_bytes") else ""
    return f"for {duration(stalled.seconds)}: {needs}{size(stalled.free_bytes)} are free; {stalled.reason}"


def start(run: pb.GetStatusResponse) -> str:
    """A line about a new run's start: whom it waits for before it hands out its first shard, and for how long."""
    missing = max(0, run.start.min_workers - run.worker_count)
    seconds, at_most = math.ceil(run.start.seconds), math.ceil(run.start.at_most_seconds)
    conditions = [f"if no other worker joins for {seconds} s, in {at_most} s at the latest"] if seconds else []
    if missing:
        conditions.append("once one more worker has joined" if missing == 1 else f"once {missing} more workers have joined")
    return ", and ".join(conditions) or "now"


def epoch(shards: pb.ShardStatus) -> str:
    """The newest epoch, counted from 1, and the number of epochs."""
    return f"epoch {shards.epoch + 1}" + (f" of {shards.epochs}" if shards.epochs else ", no limit")


def memory(status: pb.GetStatusResponse) -> str:
    limit = f" of {size(status.memory_limit_bytes)}" if status.memory_limit_bytes else ""
    return size(status.memory_bytes) + limit


def evaluation(status: pb.GetStatusResponse) -> str:
    if not status.HasField("evaluation"):
        return "–"
    score = status.evaluation
    accuracy = f", accuracy {100 * score.accuracy:.2f} %" if score.HasField("accuracy") else ""
    return f"loss {score.loss:.4f}{accuracy} at version {score.version}"


def checkpoint(status: pb.GetStatusResponse) -> str:
    if not status.HasField("checkpoint_version"):
        return "none"
    return f"version {status.checkpoint_version}, {duration(status.checkpoint_age_seconds)} ago"


def special(settings: Hyperparameters) -> dict[str, str]:
    """The hyper-parameters that differ from their defaults, beside rule and learning rate, by label."""
    shown = {}
    own = {"weight_decay", "local_momentum"} if settings.optimizer == "worker" else set()  # of the workers' optimizers
    for name, declared in DECLARATIONS.items():
        value = getattr(settings, name)
        sent = value and name not in own  # 0 or empty: an older server does not send it
        if declared.status and sent and value != DEFAULTS[name]:
            label, form = declared.status
            shown[label] = form.format(written(settings).get(name, value) if name == "optimizer" else value)
    if changes := schedule(settings):
        shown["schedule"] = changes
    return shown


def schedule(settings: Hyperparameters) -> str:
    """The schedule of the learning rate; empty if it is constant, or if each worker has its own."""
    shown = str(Schedule.of(settings))
    return "" if settings.optimizer == "worker" or shown == "constant" else shown


def brief(seconds: float) -> str:
    """A time in ms, or in seconds from 1 s. Less than a nanosecond is 0: it is what rounding leaves."""
    if seconds < 1e-9:
        return "0 ms"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def sparkline(values: Sequence[float | None]) -> str:
    """One character per value; × for NaN and infinities, a blank for None.

    The range is that of the values, but at least half of their middle, so that a steady series looks steady.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    middle, top = low / 2 + high / 2, len(_BARS) // 2  # halves first: two large numbers' sum is infinite
    half = max(high / 2 - low / 2, abs(middle) / 4) or 1.0
    bars = {value: _BARS[top + round((value - middle) / half * top)] for value in finite}
    return "".join(" " if value is None else bars.get(value, "×") for value in values)
