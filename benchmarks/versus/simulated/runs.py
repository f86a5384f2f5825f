"""The runs in simulated time: their settings, how one is made, and where the results are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from gem_api.layout import Vector

from benchmarks.lib.results import Store, plain
from benchmarks.lib.runs import settings_of
from benchmarks.versus.models import GOALS, Problem
from benchmarks.versus.profiles import KINDS
from benchmarks.versus.simulated import methods
from benchmarks.versus.simulated.engine import Cluster

METHODS: Mapping[str, Any] = {
    "rounds": methods.Synchronous,  # DDP
    "before": methods.Gem,
    "ahead": methods.LookAhead,
    "leased": partial(methods.LookAhead, count="leases"),
    "own": methods.OwnSteps,
    "paper": methods.PaperGem,
    "dana": methods.DanaAdamW,
}


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        model, profile, workers, seed: What is trained, and by whom.
        method: A name in `METHODS`.
        settings: The method's, and the cluster's `overlap`, `altered`, `joining` and `accumulated`: "rate=0.003 reach=0".
        limit: Units after which it ends.
    """

    model: str
    profile: str
    workers: int
    seed: int
    method: str
    settings: str
    limit: float = 300.0

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, {self.profile}, {self.method} {self.settings}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
        first, second: Units until the model's two losses were reached; None: never.
        lowest: The lowest held-out loss.
        end: Units until the run's end.
        gradients: Gradients used.
    """

    first: float | None
    second: float | None
    lowest: float
    end: float
    gradients: int


Outcomes = Store[Run, Outcome]


def stored(path: Path) -> Outcomes:
    """The results in a file, which need not exist."""
    return Store(path, "run", Run, vars, lambda run, row: Outcome(**row), {"format": 1})


def make_and_keep(run: Run, data: Path | None, store: Outcomes) -> str:
    """Makes a run, saves its outcome, and says what came out."""
    store.add(run, outcome := make(run, _problem(run.model, data)))
    return f"{outcome.second} units" if outcome.second is not None else f"not reached; lowest loss {outcome.lowest}"


@cache
def _problem(model: str, data: Path | None) -> Problem:
    return GOALS[model].make(data)


def make(run: Run, problem: Problem) -> Outcome:
    """Makes a run."""
    losses, given = GOALS[run.model].losses, settings_of(run.settings)
    cluster = Cluster(
        problem, KINDS[run.profile], run.workers, run.seed, run.limit, losses[1],
        overlap=given.pop("overlap", False),
        alter=ALTERED.get(given.pop("altered", "")),
        begins=JOINING[given.pop("joining", "together")],
        accumulated=ACCUMULATED[given.pop("accumulated", "once")],
    )  # fmt: skip
    method = METHODS[run.method](**given)
    curve = cluster.train_together(method) if run.method == "rounds" else cluster.train_apart(method)
    first, second = (plain(curve.time_to(loss), 5) for loss in losses)
    lowest = plain(min(loss for loss in curve.losses if loss == loss), 5)
    assert lowest is not None
    return Outcome(first, second, lowest, curve.times[-1], curve.gradients)


def _clipped(gradient: Vector, worker: int, step: int) -> Vector:
    return gradient * np.float32(min(1.0, 1.0 / max(float(np.linalg.norm(gradient)), 1e-12)))


def _int8(gradient: Vector, worker: int, step: int) -> Vector:
    """Rounded to 255 values between ± the largest of each 256 neighbours. Without the SDK's feedback of the error."""
    padded = np.pad(gradient, (0, -gradient.size % 256)).reshape(-1, 256)
    scale = np.abs(padded).max(1, keepdims=True) / np.float32(127) + np.float32(1e-30)
    return np.asarray((np.rint(padded / scale) * scale).ravel()[: gradient.size], np.float32)


ALTERED = {"clipped": _clipped, "int8": _int8}
JOINING: Mapping[str, Any] = {"together": lambda worker: 0.0, "late": lambda worker: 2.0 * worker}  # units
ACCUMULATED: Mapping[str, Any] = {"once": lambda worker: 1, "twice": lambda worker: 2, "varied": lambda worker: 1 + worker % 4}
