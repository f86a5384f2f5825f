"""Estimates the time that the experiments will still take, from their speed so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.paper.experiments import Experiment

START_SECONDS = 12.0  # fixed time of an experiment: starting server and workers, the last evaluation
FIRST_GUESS = 100.0  # gradients a second, before any was measured: two cores, about 10 ms of a core and a bit


@dataclass
class Pace:
    """Gradients per second, over the experiments of this invocation without simulated compute time."""

    gradients: int = 0
    seconds: float = 0.0

    def add(self, experiment: Experiment, gradients: int, seconds: float) -> None:
        """What an experiment has done, in seconds without its start."""
        if not experiment.step_seconds and gradients > 0 and seconds > 0:
            self.gradients += gradients
            self.seconds += seconds

    def rate(self, gradients: int = 0, seconds: float = 0.0) -> float:
        """Gradients a second, with what the present experiment has done so far."""
        total, time = self.gradients + gradients, self.seconds + seconds
        return total / time if total and time else FIRST_GUESS


def seconds_left(to_do: Iterable[Experiment], present: Experiment | None, done: int, rate: float) -> float:
    """Seconds for the experiments to do, and for what the present one lacks.

    Args:
        to_do: Those not begun.
        present: The one that runs, of which `done` gradients are there.
        rate: Gradients a second.
    """
    rest = 0.0
    if present is not None:
        lacking = max(0, present.gradients - done)
        rest = max(lacking / rate, present.simulated_seconds * lacking / present.gradients)
    return rest + sum(START_SECONDS + max(each.gradients / rate, each.simulated_seconds) for each in to_do)


def duration(seconds: float) -> str:
    """A time span in words, rounded as an estimate."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
