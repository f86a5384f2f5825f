"""A status in words and figures, as `gem-ctl status` and `gem-ctl top` print it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gem_api.errors import GemError, ServerUnavailable
from gem_api.hyperparameters import DECLARATIONS, DEFAULTS, Hyperparameters
from gem_api.v1 import training_pb2 as pb

from gem_client.ctl.plan import Plan

_BARS = "▁▂▃▄▅▆▇"  # not the full block: it would touch the line above


def counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(numbers.items()))


def optional(message: Any, field: str, form: str) -> str:
    return format(getattr(message, field), form) if message.HasField(field) else "–"


def error(failure: GemError) -> str:
    """Names the failure's type, unless the message alone says as much."""
    return str(failure) if isinstance(failure, ServerUnavailable) else f"{type(failure).__name__}: {failure}"


def state(answer: pb.GetStatusResponse) -> str:
    return pb.RunState.Name(answer.state).removeprefix("RUN_STATE_").lower()


def epoch(shards: pb.ShardStatus) -> str:
    """The newest epoch, counted from 1, of how many."""
    return f"epoch {shards.epoch + 1}" + (f" of {shards.epochs}" if shards.epochs else ", no limit")


def memory(answer: pb.GetStatusResponse) -> str:
    limit = f" of {size(answer.memory_limit_bytes)}" if answer.memory_limit_bytes else ""
    return size(answer.memory_bytes) + limit


def evaluation(answer: pb.GetStatusResponse) -> str:
    if not answer.HasField("evaluation"):
        return "–"
    score = answer.evaluation
    accuracy = f", accuracy {100 * score.accuracy:.2f} %" if score.HasField("accuracy") else ""
    return f"loss {score.loss:.4f}{accuracy} at version {score.version}"


def checkpoint(answer: pb.GetStatusResponse) -> str:
    if not answer.HasField("checkpoint_version"):
        return "none"
    return f"version {answer.checkpoint_version}, {duration(answer.checkpoint_age_seconds)} ago"


def special(settings: Hyperparameters) -> dict[str, str]:
    """The hyper-parameters that differ from their defaults, beside rule and learning rate, by label."""
    shown = {}
    for name, declared in DECLARATIONS.items():
        value = getattr(settings, name)
        if declared.status and value and value != DEFAULTS[name]:  # 0 or empty: an older server does not send it
            label, form = declared.status
            shown[label] = form.format(value)
    if changes := schedule(settings):
        shown["schedule"] = changes
    return shown


def schedule(settings: Hyperparameters) -> str:
    """How the learning rate follows the version; empty where it does not."""
    span, last = settings.decay_versions, settings.decay_factor
    parts = {
        "step": [f"×{last:g} every {span} versions"],
        "cosine": [f"cosine to ×{last:g} over {span} versions"],
    }.get(settings.schedule, [])
    if settings.warmup_versions:
        parts = [f"warm-up over {settings.warmup_versions} versions", *parts]
    return ", then ".join(parts)


def plan(planned: Plan) -> str:
    lines = {
        "server memory": f"{size(planned.server_bytes)}, {size(planned.worker_bytes)} of it for each worker",
        "network": f"{size(planned.bytes_per_second)}/s, {size(planned.commit_bytes)} for each commit"
        if planned.commit_bytes
        else "headers only: tensors pass through shared memory",
        "commits": f"{planned.commits_per_second:.4g}/s, {_brief(planned.server_seconds)} of the server each",
        "server load": f"{100 * planned.load:.0f} %",
        "full at": f"{planned.full_at:.3g} workers; more of them bring no more commits",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())


def _brief(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def figure(value: float | None) -> str:
    """In at most nine characters, however large or small; a dash for what is unknown."""
    if value is None:
        return "–"
    return f"{value:.4f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.2e}"


def rate(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def sparkline(values: Sequence[float | None]) -> str:
    """One character for each value; × for what is not finite, a blank for None.

    The range is the values' own, but at least half of their middle: what is steady looks steady.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    middle, top = low / 2 + high / 2, len(_BARS) // 2  # halves first: two large numbers' sum is infinite
    half = max(high / 2 - low / 2, abs(middle) / 4) or 1.0
    bars = {value: _BARS[top + round((value - middle) / half * top)] for value in finite}
    return "".join(" " if value is None else bars.get(value, "×") for value in values)
