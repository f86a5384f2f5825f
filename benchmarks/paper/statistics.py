"""Statistics that figures and claims share: means over seeds, final losses, the time until a loss is reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paper.experiments import TRAINING_SAMPLES, Experiment
from benchmarks.paper.plan import Group
from benchmarks.paper.results import Array, Result

CHANCE = math.log(10)  # the loss of ten equally likely classes
NOT_LEARNED = 2.0  # a final loss above it is that of a model that has learned next to nothing
_GRID = 200
_SMOOTH = 0.03  # share of a curve's points in each smoothed mean
_FINAL = 0.1  # share of a run, at its end, that the final loss is the mean of

Axis = Callable[[Result], Array]


@dataclass(frozen=True)
class Measured:
    """One line of a figure, with its results so far."""

    label: str
    experiment: Experiment
    results: list[Result]

    @property
    def workers(self) -> int:
        return self.experiment.workers

    @property
    def loss(self) -> Spread:
        """The final loss."""
        return spread(final(result) for result in self.results)

    @property
    def accuracy(self) -> Spread:
        """Test accuracy, 0 to 1."""
        return spread(result.test_accuracy for result in self.results)

    @property
    def pi(self) -> Spread:
        """The median π of a commit, averaged over the run."""
        known = (result.curves["pi_median"] for result in self.results if "pi_median" in result.curves)
        return spread(float(values[np.isfinite(values)].mean()) for values in known if np.isfinite(values).any())

    @property
    def failed(self) -> int:
        """How many of the runs did not learn."""
        return sum(not learned(result) for result in self.results)

    @property
    def worst(self) -> float:
        """The mean final loss, infinite where a run did not learn."""
        return math.inf if self.failed else self.loss.mean


@dataclass(frozen=True)
class Band:
    """A curve: mean, lowest and highest over the seeds, on a grid. NaN where no seed has a value."""

    x: Array
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Spread:
    """One number over the seeds."""

    mean: float
    low: float
    high: float
    count: int

    def text(self, form: str = "{:.3f}", scale: float = 1.0) -> str:
        """The mean; with several seeds also the lowest and the highest."""
        if not self.count:
            return "–"
        mean, low, high = (form.format(scale * value) for value in (self.mean, self.low, self.high))
        return f"{mean} ({low}–{high})" if self.count > 1 else mean


def gather(groups: Iterable[Group], lookup: Callable[[Experiment], Result | None]) -> list[Measured]:
    """The groups with at least one result."""
    found = (
        Measured(group.label, group.first, [result for each in group.experiments if (result := lookup(each))])
        for group in groups
    )
    return [each for each in found if each.results]


def worker_steps(result: Result) -> Array:
    return result.steps


def data_epochs(result: Result) -> Array:
    """Passes over the training set, by all workers together."""
    return result.curves["samples"] / TRAINING_SAMPLES[result.experiment.task]


def samples(result: Result) -> Array:
    return result.curves["samples"]


def run_seconds(result: Result) -> Array:
    """Seconds since the workers began with their first gradient: a simulated step before the first commit."""
    return result.curves["seconds"] + result.experiment.step_seconds


def smooth(values: Array, share: float = _SMOOTH) -> Array:
    """A centred moving mean of the finite values; NaN where there are none. The ends take in what there is."""
    half = int(share * len(values) / 2)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    begin = np.clip(np.arange(len(values)) - half, 0, None)
    end = np.clip(np.arange(len(values)) + half + 1, None, len(values))
    number = counts[end] - counts[begin]
    means: Array = np.divide(sums[end] - sums[begin], number, out=np.full(len(values), math.nan), where=number > 0)
    return means


def band(results: Sequence[Result], x: Axis, column: str) -> Band:
    """The smoothed column over the seeds, on a common grid; a seed whose run ended early counts as far as it went."""
    return over_seeds([(x(result), smooth(result.curves[column])) for result in results if column in result.curves])


def training(results: Sequence[Result]) -> Band:
    """The training loss over data epochs."""
    return band(results, data_epochs, "loss")


def validation(results: Sequence[Result]) -> Band:
    """The validation loss over data epochs."""
    curves = []
    for result in results:
        experiment, versions = result.experiment, result.evaluations["version"]
        curves.append((versions * experiment.batch_size / TRAINING_SAMPLES[experiment.task], result.evaluations["loss"]))
    return over_seeds(curves)


def over_seeds(curves: Sequence[tuple[Array, Array]]) -> Band:
    """Mean, lowest and highest of curves (x ascending, y) on a common grid. A curve without points is left out."""
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return Band(*(np.array([]) for _ in range(4)))
    grid = np.linspace(min(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), _GRID)
    rows = np.array([np.interp(grid, x, y, left=math.nan, right=math.nan) for x, y in curves])
    known = np.isfinite(rows)
    number = known.sum(axis=0)
    mean = np.divide(np.where(known, rows, 0).sum(axis=0), number, out=np.full(_GRID, math.nan), where=number > 0)
    low, high = np.where(known, rows, np.inf).min(axis=0), np.where(known, rows, -np.inf).max(axis=0)
    return Band(grid, mean, np.where(number > 0, low, math.nan), np.where(number > 0, high, math.nan))


def spread(values: Iterable[float | None]) -> Spread:
    """Of the values that are numbers."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Spread(math.nan, math.nan, math.nan, 0)
    return Spread(sum(known) / len(known), min(known), max(known), len(known))


def columns(x: Sequence[float], values: Sequence[Spread], scale: float = 1.0) -> dict[str, Array]:
    """The numbers as columns x, mean, low and high."""
    rows = {name: scale * np.array([getattr(each, name) for each in values]) for name in ("mean", "low", "high")}
    return {"x": np.array(x, float), **rows}


def final(result: Result, column: str = "loss") -> float:
    """The mean over the last tenth of the run; NaN where it has no numbers, or where the run diverged."""
    values = result.curves.get(column, np.array([]))
    last = values[-max(1, int(_FINAL * len(values))) :]
    known = last[np.isfinite(last)]
    return float(known.mean()) if len(known) and result.outcome != "diverged" else math.nan


def validation_rise(result: Result) -> tuple[float, float]:
    """The validation loss at the end, divided by its lowest; and when it was lowest, as a share of the run. Losses are means
    over a tenth of the run."""
    losses = smooth(result.evaluations["loss"], _FINAL)
    lowest = int(np.nanargmin(losses))
    return float(losses[-1] / losses[lowest]), float(result.evaluations["version"][lowest] / result.evaluations["version"][-1])


def training_rise(result: Result, place: float) -> float:
    """The training loss at the end, divided by that at this share of the run, over the same tenths."""
    losses, versions = smooth(result.curves["loss"], _FINAL), result.curves["version"]
    return float(losses[-1] / np.interp(place * versions[-1], versions, losses))


def learned(result: Result) -> bool:
    """Whether the model learned: it did not if the run diverged or stayed at chance."""
    return final(result) < NOT_LEARNED


def seconds_to(result: Result, target: float, window: float) -> float:
    """Seconds until the mean loss of the last `window` samples is at most the target; NaN if that never happens."""
    done, loss, seconds = samples(result), result.curves["loss"], run_seconds(result)
    for here in range(len(done)):
        recent = (done > done[here] - window) & (done <= done[here])
        if done[here] >= window and np.nanmean(loss[recent]) <= target:
            return float(seconds[here])
    return math.nan
