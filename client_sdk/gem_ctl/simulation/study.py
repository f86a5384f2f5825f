"""A study: one scenario with several numbers of workers, and what each of them needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gem_ctl.plan import servers_needed
from gem_ctl.simulation.outcome import MAX_COMMITS, Outcome, outcome
from gem_ctl.simulation.scenario import Scenario
from gem_ctl.simulation.search import full_at, saturating_workers, servers_for_load


@dataclass(frozen=True)
class Bounds:
    """What each server may have: bytes of memory, and a share of the time in which it is busy. None if it does not matter."""

    memory: int | None = None
    load: float | None = None


@dataclass(frozen=True)
class Needs:
    """The least number of servers that keeps each bound. None if no number does, or if there is no bound."""

    servers_for_memory: int | None
    servers_for_load: int | None


@dataclass(frozen=True)
class Study:
    """The outcomes of a scenario.

    Attributes:
        scenario: What was simulated. Its number of workers is the first one.
        outcomes: One for each number of workers.
        saturated_at: Number of workers that keep the server busy 99 % of the time; None above 100,000.
        full_at: The closed form of that number.
        bounds: The bounds for each server.
        needs: The servers that they need, for each outcome.
    """

    scenario: Scenario
    outcomes: tuple[Outcome, ...]
    saturated_at: int | None
    full_at: float
    bounds: Bounds
    needs: tuple[Needs, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it, for scripts."""
        return asdict(self)


def study(
    scenario: Scenario, workers: Sequence[int], bounds: Bounds = Bounds(), seed: int = 0, max_commits: int = MAX_COMMITS
) -> Study:
    """Simulates the scenario with each number of workers. Raises InvalidRequest for an unknown format."""
    each = [replace(scenario, setup=replace(scenario.setup, workers=count)) for count in workers]
    return Study(
        scenario=each[0],
        outcomes=tuple(outcome(one, seed, max_commits) for one in each),
        saturated_at=saturating_workers(scenario, seed, max_commits),
        full_at=full_at(scenario),
        bounds=bounds,
        needs=tuple(_needs(one, bounds, seed, max_commits) for one in each),
    )


def _needs(scenario: Scenario, bounds: Bounds, seed: int, max_commits: int) -> Needs:
    return Needs(
        servers_needed(scenario.setup, bounds.memory) if bounds.memory else None,
        servers_for_load(scenario, bounds.load, seed, max_commits) if bounds.load else None,
    )
