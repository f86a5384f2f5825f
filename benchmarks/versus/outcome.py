"""A run's settings as the results keep them, what came out of it, and when a curve crosses a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# (units from the start, held-out loss, samples, exchanges); the loss is None if it was NaN or infinite.
Point = tuple[float, float | None, int, int]
MAX_POINTS = 200


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        contender, model, profile: Keys of CONTENDERS, GOALS and PROFILES.
        workers: How many.
        rate: The learning rate.
        seed: Of the first θ, the batches and the times.
    """

    contender: str
    model: str
    workers: int
    profile: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.workers} workers, {self.profile}: {self.contender}, rate {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What came out of a run.

    Attributes:
        units: When each of the two losses was reached; None if it was not.
        samples: Samples used until then.
        exchanges: Exchanges of workers until then.
        lowest: The lowest held-out loss; None if there is none.
        diverged: Whether the loss, or a gradient, was not finite.
        curve: All scores, thinned out.
        seconds: How long the run took, its start included.
    """

    units: tuple[float | None, float | None]
    samples: tuple[int | None, int | None]
    exchanges: tuple[int | None, int | None]
    lowest: float | None
    diverged: bool
    curve: tuple[Point, ...]
    seconds: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> Outcome:
        """The outcome that a row of JSON holds."""
        return cls(**{name: _tuples(value) for name, value in row.items()})


def outcome(curve: Sequence[Point], losses: tuple[float, float], diverged: bool, seconds: float) -> Outcome:
    """The outcome of a whole curve."""
    first, second = (crossing(curve, loss) for loss in losses)
    return Outcome(
        (first and round(first[0], 2), second and round(second[0], 2)),
        (first and round(first[1]), second and round(second[1])),
        (first and round(first[2]), second and round(second[2])),
        min((loss for _, loss, _, _ in curve if loss is not None), default=None),
        diverged,
        tuple(thinned(curve)),
        round(seconds, 1),
    )


def crossing(curve: Sequence[Point], loss: float) -> tuple[float, float, float] | None:
    """The units, samples and exchanges at which a loss is first reached, between the scores around it; None if it never is."""
    before: Point | None = None
    for point in curve:
        if point[1] is not None and point[1] <= loss:
            if before is None or before[1] is None:
                return float(point[0]), float(point[2]), float(point[3])
            share = (before[1] - loss) / (before[1] - point[1])
            units, samples, exchanges = (
                early + share * (late - early)
                for early, late in ((before[0], point[0]), (before[2], point[2]), (before[3], point[3]))
            )
            return units, samples, exchanges
        before = point
    return None


def thinned(curve: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most this many points, evenly chosen, with the first and the last."""
    if len(curve) <= most:
        return list(curve)
    return [curve[round(number * (len(curve) - 1) / (most - 1))] for number in range(most)]


def finite(loss: float) -> float | None:
    return round(loss, 5) if math.isfinite(loss) else None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
