"""A session's card: what a notebook shows of it. HTML in one element that loads nothing, in the notebook's own colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape

from gem_api.errors import DeadlineExceeded, GemError
from gem_api.process.printable import printable
from gem_api.v1 import training_pb2 as pb

from gem_client.run.membership import Membership

PATIENCE = 2.0  # seconds to wait for the server
_WIDTH, _HEIGHT, _MARGIN = 220, 56, 3  # of a curve, in pixels
_INK, _GREY, _RED = "#2f7fd6", "rgba(128,128,128,.35)", "#d9534f"  # visible on white and on black; text keeps its colour
_QUIET = "opacity:.75;font-size:12px"
_ROW = "display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 0"


def card(member: Membership) -> str:
    """The state of a session and of its run. Asks the server for the run; changes nothing and never raises."""
    subtitle, own = "", {}
    try:
        subtitle = f"server {member.links.leader.address}"
        own = {"version": f"{member.version:,}", "own commits": f"{member.steps_done:,}"}
        member.require_usable()
        run = member.links.leader.connection.status(PATIENCE, curves=True)
        subtitle, body = f"{_state(run)} · {subtitle} · run {run.run_id}", _run(run, own)
    except Exception as error:  # a notebook would show a traceback in place of the session
        body = _warning(_why(error)) + _facts(own)
    title = f"<b>GEM session {_safe(member.name)}</b> <span style='{_QUIET}'>{_safe(subtitle)}</span>"
    style = f"border:1px solid {_GREY};border-radius:8px;padding:8px 14px;max-width:740px;overflow-wrap:anywhere"
    return f"<div style='{style}'>{title}{body}</div>"


def _why(error: Exception) -> str:
    if isinstance(error, DeadlineExceeded):
        return f"the server did not answer within {PATIENCE:g} s"
    return str(error) if isinstance(error, GemError) else f"{type(error).__name__}: {error}"


def _run(run: pb.GetStatusResponse, own: Mapping[str, str]) -> str:
    steps, curves, score = run.hyperparameters.steps, run.curves, run.evaluation
    accuracy = f", accuracy {100 * score.accuracy:.1f} %" if score.HasField("accuracy") else ""
    facts = {
        "version": f"{run.version:,}",
        "own commits": own["own commits"] + (f" of {steps:,}" if steps else ""),
        "workers": f"{run.worker_count:,}",
        "staleness": _number(run.staleness),
        "median π": _number(run.pi_median) if run.HasField("pi_median") else "–",
        "training loss": _number(run.training_loss) if run.HasField("training_loss") else "–",
        "held-out loss": f"{_number(score.loss)}{accuracy}" if run.HasField("evaluation") else "–",
    }
    drawn = [
        _curve("training loss", curves.seconds, curves.loss),
        _curve("staleness", curves.seconds, curves.staleness),
        _curve("median π", curves.seconds, curves.pi_median),
    ]
    stalled = _warning(run.stall.reason) if run.HasField("stall") else ""
    return f"{stalled}{_progress(run.shards)}{_facts(facts)}<div style='{_ROW}'>{''.join(drawn)}</div>"


def _state(run: pb.GetStatusResponse) -> str:
    known = run.state in pb.RunState.values()  # a newer server may have others
    return pb.RunState.Name(run.state).removeprefix("RUN_STATE_").lower() if known else f"state {run.state}"


def _progress(shards: pb.ShardStatus) -> str:
    """The newest epoch; if there is a last one, also a bar: the share of all epochs' shards that are complete."""
    text, bar = f"epoch {shards.epoch + 1:,}", ""
    if shards.epochs:
        every = (shards.completed + shards.leased + shards.pending) / (shards.epoch + 1) * shards.epochs
        percent = math.floor(100 * min(1.0, shards.completed / every)) if every else 0
        text += f" of {shards.epochs:,}, {percent} % of the run"
        done = f"<div style='background:{_INK};border-radius:3px;height:6px;width:{percent}%'></div>"
        bar = f"<div style='background:{_GREY};border-radius:3px;margin:8px 0 2px'>{done}</div>"
    return f"{bar}<div style='{_QUIET}'>{text}</div>"


def _facts(facts: Mapping[str, str]) -> str:
    shown = "".join(f"<span><span style='{_QUIET}'>{label}</span> {_safe(value)}</span>" for label, value in facts.items())
    return f"<div style='{_ROW}'>{shown}</div>"


def _curve(title: str, seconds: Iterable[float], values: Iterable[float]) -> str:
    """A line over the training time, under its title and its range; empty without a finite value."""
    points = [(x, y) for x, y in zip(seconds, values, strict=False) if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return ""
    low, high, end = min(y for _, y in points), max(y for _, y in points), max(x for x, _ in points)
    across, down = _onto(0.0, end, _MARGIN, _WIDTH - _MARGIN), _onto(low, high, _HEIGHT - _MARGIN, _MARGIN)
    line = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in [*points, points[-1]])  # a single point becomes a dot
    label = f"{title}: {_number(low)} to {_number(high)} in {end:,.0f} s"
    return (
        f"<div><div style='{_QUIET}'>{label}</div><svg role='img' aria-label='{label}' width='{_WIDTH}' height='{_HEIGHT}' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}'><polyline points='{line}' fill='none' stroke='{_INK}' stroke-width='1.5' "
        "stroke-linecap='round' stroke-linejoin='round'/></svg></div>"
    )


def _onto(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Maps values from `low` to `high` onto pixels from `first` to `last`, equal values onto the middle."""
    return lambda value: first + (last - first) * ((value - low) / (high - low) if high > low else 0.5)


def _warning(text: str) -> str:
    return f"<div style='border-left:4px solid {_RED};padding-left:8px;margin:8px 0'>{_safe(text)}</div>"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "–"


def _safe(text: str) -> str:
    return escape(printable(text))
