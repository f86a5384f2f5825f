"""The moving mean of a worker's times."""

from __future__ import annotations

MEMORY = 1 / 8  # weight of the newest step
LONGEST = 4.0  # times the mean: a longer step counts as that long, as it may be a pause


def moved(mean: float, seconds: float, weight: float = MEMORY) -> float:
    """The mean after one more step, which has this weight."""
    longest = LONGEST * mean
    return mean + weight * ((seconds if seconds < longest else longest) - mean)
