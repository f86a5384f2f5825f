"""The plan as text: what the run needs, and a table with a line for each number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gem_ctl import text
from gem_ctl.planning.outcome import Distribution, Outcome
from gem_ctl.planning.plan import Plan, plan
from gem_ctl.planning.scenario import Scenario, gradients_per_second, workers_that_pay

_COLUMNS = ("workers", "commits/s", "load", "τ mean", "5 %", "50 %", "95 %", "τ max", "queue", "queue max", "wait", "idle",
            "further", "memory")  # fmt: skip
_OF_LENGTH = ("batches each", "run takes")
# Batches of each worker below which more workers gain little: see the section "How many workers" of docs/tuning.md.
ROUNDS = 100
_MANY = 10  # times as many workers as pay fill the server or its link


def show(scenario: Scenario, outcomes: list[Outcome]) -> str:
    """The run's needs, then a line for each number of workers. Staleness τ is in commits, the queue in waiting commits."""
    planned = plan(scenario.setup, scenario.costs)
    parts = ["\n".join(f"{name:<14} {value}" for name, value in _needs(scenario, planned).items())]
    heads = _COLUMNS + _OF_LENGTH * bool(scenario.batches)
    parts.append(_aligned([heads, *(_row(each) + _length(scenario, each) for each in outcomes)]))
    if any(len(outcome.groups) > 1 for outcome in outcomes):
        parts.append(_aligned(list(_speeds(outcomes))))
    return "\n\n".join([*parts, *_notes(scenario, outcomes)])


def _needs(scenario: Scenario, planned: Plan) -> dict[str, str]:
    """Lines about memory and traffic. Those of the server hold for each of several."""
    each = f"on each of {planned.servers}, " if planned.servers > 1 else ""
    part = f", {text.size(planned.commit_bytes / planned.servers)} of them at each server" if planned.servers > 1 else ""
    enough = max(1, scenario.batches // ROUNDS)
    copies = f"{text.size(planned.checkpoint_fixed_bytes)}, and {text.size(planned.checkpoint_worker_bytes)} per worker"
    needs = {
        "server memory": f"{each}{text.size(planned.fixed_bytes)}, and {text.size(planned.worker_bytes)} per worker",
        "checkpoint": f"up to {copies}, more while it is written, if there is room",
        "network": f"{text.size(planned.commit_bytes)} per commit, both ways{part}"
        if planned.commit_bytes
        else "headers only: tensors pass through shared memory",
        "server time": f"{text.brief(planned.server_seconds)} per commit",
        "pays up to": _pays(scenario),
    }
    if scenario.batches:
        needs["long enough"] = f"for {enough:,} worker{'s' * (enough > 1)}; with more, each has fewer than {ROUNDS} batches"
    return needs


def _pays(scenario: Scenario) -> str:
    """The number of workers that pay, and their speed beside a plain loop. None pay if that loop is faster than any of them."""
    pays, setup = workers_that_pay(scenario), scenario.setup

    def speed(workers: int) -> float:
        return gradients_per_second(replace(scenario, setup=replace(setup, workers=workers))) * setup.compute_seconds

    if 0 < (most := speed(_MANY * pays)) <= 1:
        return f"no number of workers: a plain loop is {1 / most:.3g} × as fast as any number of them"
    much = f", {speed(pays):.3g} × as fast as a plain loop" * bool(setup.compute_seconds)
    return f"{pays:,} worker{'s' * (pays > 1)}{much}; further ones mostly wait"


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        f"{outcome.workers:,}",
        f"{outcome.commits_per_second:.4g}",
        f"{100 * outcome.load:.0f} %",
        *_staleness(outcome.staleness),
        f"{outcome.queue_mean:,.1f}",
        f"{outcome.queue_max:,}",
        text.brief(outcome.wait),
        f"{100 * outcome.idle:.0f} %",
        _further(outcome.further),
        text.size(outcome.server_bytes),
    )


def _length(scenario: Scenario, outcome: Outcome) -> tuple[str, ...]:
    """What the length of the run means for each worker; empty if it is not known."""
    if not scenario.batches:
        return ()
    return f"{scenario.batches / outcome.workers:,.0f}", text.duration(outcome.run_seconds)


def _further(gradients: float) -> str:
    return f"{gradients:+.3g}" if abs(gradients) >= 5e-4 else "0"  # less is rounding


def _staleness(of: Distribution) -> Iterator[str]:
    yield f"{of.mean:,.1f}"
    yield from (f"{value:,.0f}" for value in (of.p5, of.p50, of.p95, of.max))


def _speeds(outcomes: list[Outcome]) -> Iterator[tuple[str, ...]]:
    """A line for each speed of the workers."""
    yield "workers", "compute", "commits/s", "τ mean", "5 %", "50 %", "95 %", "max", "further"
    for outcome in outcomes:
        for group in outcome.groups:
            of = group.staleness
            yield (
                f"{group.workers:,}",
                f"× {group.factor:g}",
                f"{group.commits_per_second:.4g}",
                *(_staleness(of) if of else "–" * 5),
                _further(group.further),
            )


def _notes(scenario: Scenario, outcomes: list[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        factors = {group.factor for group in outcome.groups}
        for group in scenario.slow:
            if group.factor not in factors and group.share:
                share, times = f"{100 * group.share:g} %", f"{group.factor:g} times"
                yield f"note: {share} of {outcome.workers:,} are none: nobody computes {times} as long"
        if not outcome.settled:
            yield (
                f"note: the simulation is too short for {outcome.workers:,} workers: the slowest made fewer than two commits, "
                "so the true staleness is higher"
            )


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
