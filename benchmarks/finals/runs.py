"""A run to the end of training: its settings, how it is made, and where results are kept."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from gem_api.layout import Vector

from benchmarks.finals import apart, together
from benchmarks.finals.clock import OVERHEAD, SIZES, Clock, Policy
from benchmarks.finals.held_out import Tagger, Trees
from benchmarks.finals.neighbours import Dana, Plain
from benchmarks.lib.results import Store, plain
from benchmarks.lib.vectors import VectorModel
from benchmarks.versus import models
from benchmarks.versus.models import Problem
from benchmarks.versus.profiles import KINDS

MODELS: Mapping[str, Callable[[Path | None], Problem]] = {
    **models.MODELS,
    "tagger": lambda data: Tagger(),
    "trees": lambda data: Trees(),
}
DIVERGED = 50.0  # a held-out loss that no run comes back from
_PAUSING = 1 + 29 / 50  # mean time of a gradient there


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        model, profile, workers, seed: What is trained, and by whom.
        rounds: How long: the time in which workers that don't wait compute this many gradients each, on average.
        method: "ours", "plain", "dana", "rounds", "local"; "real ours", "real rounds" with real processes, and
            "cut ours", "cut rounds" (see `real`).
        settings: "rate=0.006 shares=few wait=0.15".
    """

    model: str
    profile: str
    workers: int
    seed: int
    rounds: int
    method: str
    settings: str

    def __str__(self) -> str:
        return f"{self.model} {self.workers} {self.profile} {self.rounds} {self.method} {self.settings}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
        loss: The held-out loss at the end; None if it diverged.
        accuracy: The share of right answers on held-out data, if that is asked for.
        time: Units.
        gradients: Whole batches used.
        commits: Commits, or rounds.
        curve: Units, and held-out loss then; of real processes alone.
    """

    loss: float | None
    accuracy: float | None
    time: float
    gradients: float
    commits: int
    curve: tuple[tuple[float, float | None], ...] = ()

    def __str__(self) -> str:
        return f"{self.loss} {self.accuracy or ''} ({self.gradients} gradients, {self.commits} commits)"

    def row(self) -> dict[str, Any]:
        """As it is stored."""
        return {name: value for name, value in vars(self).items() if name != "curve" or value}


def stored(path: Path) -> Store[Run, Outcome]:
    return Store(path, "run", Run, Outcome.row, lambda run, row: Outcome(**row), {"format": 1})


def limit_of(run: Run) -> float:
    """The units that a run takes."""
    profile = KINDS[run.profile]
    usual = _PAUSING if run.profile == "pausing" else 1.0
    times = [
        usual * profile.factor(w, run.workers) + (OVERHEAD if w >= run.workers - profile.far else 0.0)
        for w in range(run.workers)
    ]
    return run.rounds * run.workers / sum(1 / each for each in times)


class Trainee(VectorModel):
    """The model, with gradients of batches of any size."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem.model(seed))
        self._problem, self._seed = problem, seed

    def gradient(self, theta: Vector, worker: int, step: int, size: int) -> Vector:
        """At θ, on the first `size` samples of a worker's step; valid until the next call."""
        return self.joint(theta, [(worker, step, size)])

    def joint(self, theta: Vector, parts: list[tuple[int, int, int]]) -> Vector:
        """At θ, on the samples of several workers together."""
        batches = [self._problem.batch(self._seed, worker, step, size) for worker, step, size in parts]
        batch = torch.cat([one[0] for one in batches]), torch.cat([one[1] for one in batches])
        return self.gradient_of(theta, lambda model: self._problem.loss(model, batch))[0]

    def score(self, theta: Vector) -> float:
        """The held-out loss."""
        return self._problem.score(self.at(theta))

    def accuracy(self, theta: Vector) -> float | None:
        """The share of right answers on held-out data, if that is asked for."""
        return self._problem.accuracy(self.at(theta))


@lru_cache
def problem_of(model: str, data: Path | None) -> Problem:
    return MODELS[model](data)


def make(run: Run, data: Path | None) -> Outcome:
    """Makes a run."""
    return train(run, Trainee(problem_of(run.model, data), run.seed), apart.Rule, together.Synchronous)


def train(run: Run, trainee: Any, rule: Callable[..., apart.Rule], rounds: Callable[..., together.Synchronous]) -> Outcome:
    """Makes a run.

    Args:
        trainee: A `Trainee`, or what has the same methods and other vectors.
        rule, rounds: What trains such vectors.
    """
    given, profile, limit = settings_of(run), KINDS[run.profile], limit_of(run)
    every, next_look, lost = limit / 20, [limit / 20], [False]

    def look(time: float, theta: Vector) -> bool:
        if time < next_look[0]:
            return lost[0]
        next_look[0] = time + every
        lost[0] = not trainee.score(theta) < DIVERGED  # NaN is not
        return lost[0]

    asynchronous: dict[str, Callable[..., Any]] = {"ours": rule, "dana": Dana, "plain": Plain}
    if run.method in asynchronous:
        policy = take_policy(given)
        events = Clock(profile, run.workers, run.seed, policy, limit).events()
        theta = asynchronous[run.method](**given).train(trainee.theta, events, run.workers, trainee.gradient, look)
        gradients, commits = sum(event.size for event in events) / SIZES, sum(event.size > 0 for event in events)
    else:
        team = take_team(given)
        done = together.rounds(
            team, profile, run.workers, run.seed, run.rounds * run.workers if team.kind == "alone" else limit
        )
        if run.method == "rounds":
            theta = rounds(**given).train(trainee.theta, done, trainee.joint, look)
        else:
            theta = together.LocalSteps(**given).train(trainee.theta, done, trainee.gradient, look)
        gradients, commits = sum(size for one in done for _, _, size in one.parts) * team.steps / SIZES, len(done)
    loss, right = math.inf if lost[0] else trainee.score(theta), trainee.accuracy(theta)
    return Outcome(plain(loss, 5), right, plain(limit, 5) or 0.0, plain(gradients, 6) or 0.0, commits)


def settings_of(run: Run) -> dict[str, Any]:
    return {name: _value(value) for name, _, value in (each.partition("=") for each in run.settings.split())}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def take_policy(given: dict[str, Any]) -> Policy:
    """Removes what the server does about unequal times from the settings."""
    return Policy(**{name: given.pop(name) for name in ("smallest", "wait", "until") if name in given})


def take_team(given: dict[str, Any]) -> together.Team:
    """Removes who takes part in a round from the settings."""
    return together.Team(given.pop("team", "all"), int(given.pop("first", 0)), int(given.get("steps", 1)))
