"""Kinds of clusters: how long each gradient of each worker takes, from a table that depends on seed, worker and step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

_BLOCK = 256  # times drawn at once
_NEARLY = 0.05  # the spread of workers that are called equal
LINK_RATE, LINK_DELAY = 100e6, 0.02  # of the slow link: bits per second, and seconds one way


def _equal(random: np.random.Generator, size: int) -> np.ndarray:
    return np.clip(random.normal(1.0, _NEARLY, size), 0.5, 1.5)


def _noisy(random: np.random.Generator, size: int) -> np.ndarray:
    """Log-normal times, spread 0.5."""
    sigma = math.sqrt(math.log(1 + 0.5**2))
    return random.lognormal(-(sigma**2) / 2, sigma, size)


def _pausing(random: np.random.Generator, size: int) -> np.ndarray:
    """One gradient in 50 takes 30 units."""
    return _equal(random, size) * np.where(random.random(size) < 1 / 50, 30.0, 1.0)


@dataclass(frozen=True)
class Profile:
    """A kind of cluster. Times are in units: the mean time that one gradient takes an equal worker.

    Attributes:
        about: In a few words.
        factor: How many times as long a worker's gradients take: a function of its number and the number of workers.
        draw: Draws times with a mean of 1.
        killed_every: In units, how often a worker is killed; 0 for never. The workers take turns.
        away: In units, how long it stays away.
        far: How many workers, the last ones, are behind a slow link.
        unit: How many times as long a unit takes here in a comparison of real processes. What workers need to find each other
            again, or the link, in seconds, is then a smaller part of it.
    """

    about: str
    factor: Callable[[int, int], float] = lambda worker, workers: 1.0
    draw: Callable[[np.random.Generator, int], np.ndarray] = _equal
    killed_every: float = 0.0
    away: float = 0.0
    far: int = 0
    unit: float = 1.0

    def times(self, seed: int, worker: int, workers: int) -> Callable[[int], float]:
        """The time of a worker's step, by its number from 0."""
        random, drawn, scale = np.random.default_rng([7, seed, worker]), list[float](), self.factor(worker, workers)

        def time(step: int) -> float:
            while step >= len(drawn):
                drawn.extend((scale * self.draw(random, _BLOCK)).tolist())
            return drawn[step]

        return time

    def kills(self, workers: int) -> Callable[[int], tuple[float, int]]:
        """When the k-th kill happens, in units from the start, and which worker it hits. Worker 0 is spared."""
        return lambda number: ((number + 1) * self.killed_every, 1 + number * 3 % (workers - 1))


KINDS: Mapping[str, Profile] = {
    "equal": Profile("all alike"),
    "noisy": Profile("times vary by half", draw=_noisy),
    "straggler": Profile("one 5 × slower", lambda worker, workers: 5.0 if worker == workers - 1 else 1.0),
    "mixed": Profile("half 3 × slower", lambda worker, workers: 3.0 if worker >= workers - workers // 2 else 1.0),
    "exponential": Profile("times vary at random", draw=lambda random, size: random.exponential(1.0, size)),
    "spot": Profile("one killed now and then", killed_every=20, away=10, unit=4),
    "far": Profile("two behind a slow link", far=2, unit=4),
    "quarter": Profile("three of four 10 × slower", lambda worker, workers: 1.0 if worker < max(1, workers // 4) else 10.0),
    "first": Profile("all but one 5 × slower", lambda worker, workers: 1.0 if worker == 0 else 5.0),
    "pausing": Profile("1 step in 50 takes 30 ×", draw=_pausing),
}
