"""A study as text: a table with a line for each number of workers, and what else there is to say."""

from __future__ import annotations

from collections.abc import Iterator

from gem_ctl import text
from gem_ctl.simulation.outcome import Distribution, Outcome
from gem_ctl.simulation.search import MAX_WORKERS
from gem_ctl.simulation.study import Study

_COLUMNS = ("workers", "commits/s", "by plan", "load", "τ mean", "5 %", "50 %", "95 %", "max", "queue", "max", "wait", "idle",
            "memory")  # fmt: skip


def show(study: Study) -> str:
    """The whole study. Staleness τ is in commits, the queue in commits that wait."""
    parts = [_aligned([_COLUMNS, *map(_row, study.outcomes)])]
    if any(len(outcome.groups) > 1 for outcome in study.outcomes):
        parts.append(_aligned(list(_speeds(study))))
    if study.bounds.memory or study.bounds.load:
        parts.append(_aligned(list(_needs(study))))
    parts.append("\n".join([_saturation(study), *_notes(study)]))
    return "\n\n".join(parts)


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        f"{outcome.workers:,}",
        f"{outcome.commits_per_second:.4g}",
        f"{outcome.planned:.4g}",
        f"{100 * outcome.load:.0f} %",
        *_staleness(outcome.staleness),
        f"{outcome.queue_mean:,.1f}",
        f"{outcome.queue_max:,}",
        text.brief(outcome.wait),
        f"{100 * outcome.idle:.0f} %",
        text.size(outcome.server_bytes),
    )


def _staleness(of: Distribution) -> Iterator[str]:
    yield f"{of.mean:,.1f}"
    yield from (f"{value:,.0f}" for value in (of.p5, of.p50, of.p95, of.max))


def _speeds(study: Study) -> Iterator[tuple[str, ...]]:
    """A line for each speed of the workers."""
    yield "workers", "compute", "commits/s", "τ mean", "5 %", "50 %", "95 %", "max"
    for outcome in study.outcomes:
        for group in outcome.groups:
            of = group.staleness
            yield (
                f"{group.workers:,}",
                f"× {group.factor:g}",
                f"{group.commits_per_second:.4g}",
                *(_staleness(of) if of else "–" * 5),
            )


def _saturation(study: Study) -> str:
    closed = f"{study.full_at:.3g}" if study.full_at < 1000 else f"{study.full_at:,.0f}"
    if study.saturated_at is None:
        return f"saturated by more than {MAX_WORKERS:,} workers; {closed} by the closed form"
    count = study.saturated_at
    return f"saturated by {count:,} worker{'s' * (count > 1)}; {closed} by the closed form"


def _needs(study: Study) -> Iterator[tuple[str, ...]]:
    """A line for each number of workers: how many servers keep the bounds."""
    memory, load = study.bounds.memory, study.bounds.load
    heads = (f"servers of {text.size(memory)}" if memory else "", f"servers busy {100 * load:g} % at most" if load else "")
    yield ("workers", *filter(None, heads))
    for outcome, needs in zip(study.outcomes, study.needs, strict=True):
        found = zip(heads, (needs.servers_for_memory, needs.servers_for_load), strict=True)
        yield (f"{outcome.workers:,}", *("none is enough" if count is None else str(count) for head, count in found if head))


def _notes(study: Study) -> Iterator[str]:
    for outcome in study.outcomes:
        factors = {group.factor for group in outcome.groups}
        for group in study.scenario.slow:
            if group.factor not in factors and group.share:
                share, times = f"{100 * group.share:g} %", f"{group.factor:g} times"
                yield f"note: {share} of {outcome.workers:,} are none: nobody computes {times} as long"
        if not outcome.settled:
            yield (
                f"note: too short for {outcome.workers:,} workers, as the slowest made fewer than two commits: "
                "raise --commits for the true staleness and queue"
            )


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
