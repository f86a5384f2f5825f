"""Makes one more run of each line of Figs. 1 and 2, with today's code: `python -m benchmarks.paper.again`.

It takes an hour, all runs of all figures twelve: whether the figures still hold after a change is seen sooner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import click
from gem_api.process.lifetime import interruptible

from benchmarks.lib.page import count
from benchmarks.lib.results import Store, finite, restored
from benchmarks.lib.runs import make_missing
from benchmarks.paper.content import RULE_NAMES, Columns, Content
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import FIGURES, Scale
from benchmarks.paper.runner import make
from benchmarks.paper.statistics import at_the_end, final

FOLDER = Path("docs/results/paper")
REPEATED = ("1", "2")


@dataclass(frozen=True)
class Again:
    """One more run of a line.

    Attributes:
        loss: Its final loss; NaN if it diverged.
        accuracy: Its test accuracy, 0 to 1.
        low, high: The lowest and the highest final loss of the line's runs in the figure.
    """

    loss: float
    accuracy: float
    low: float
    high: float

    @property
    def within(self) -> bool:
        return self.low <= self.loss <= self.high

    def __str__(self) -> str:
        return f"final loss {self.loss:.4f}, in the figure {self.low:.4f} to {self.high:.4f}"


def again(folder: Path) -> Store[Experiment, Again]:
    """The runs so far."""
    return Store(folder / "again.json", "experiment", Experiment, finite, lambda _, row: Again(**restored(row)))


def wanted(folder: Path, scale: Scale) -> Iterator[tuple[Experiment, float, float]]:
    """The first seed of each line, with the lowest and the highest final loss that the figure in `folder` has of the line."""
    for figure in REPEATED:
        panels = Content.load(folder / f"{figure}.json").panels
        points = panels.get("final training loss")
        for group in FIGURES[figure](scale):
            found = _end(panels["loss"], group.first) if points is None else _range(points, group.first)
            yield group.first, *found


def _end(lines: dict[str, Columns], experiment: Experiment) -> tuple[float, float]:
    """The mean of a curve's band over its last tenth: each final loss of its runs lies within."""
    line = lines[count(experiment.workers)]
    return fmean(at_the_end(line["low"])), fmean(at_the_end(line["high"]))


def _range(lines: dict[str, Columns], experiment: Experiment) -> tuple[float, float]:
    line = lines[RULE_NAMES[experiment.rule]]
    at = line["x"].index(experiment.workers)
    return line["low"][at], line["high"][at]


def repeat(experiment: Experiment, low: float, high: float, data: Path) -> Again:
    result = make(experiment, data)
    return Again(final(result), math.nan if result.test_accuracy is None else result.test_accuracy, low, high)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of MNIST's four IDX files.")
@interruptible()
def main(data: Path) -> None:
    """Makes the runs that are missing, and says how many of all lie in the figure's range. Ctrl-C ends it; the same command
    continues later."""
    store = again(FOLDER)

    def told() -> Path:
        click.echo(f"{sum(each.within for each in store.values())} of {len(store)} runs lie in the figure's range")
        return store.path

    make_missing(((store, each, partial(repeat, each, low, high, data)) for each, low, high in wanted(FOLDER, Scale())), told)


if __name__ == "__main__":
    main()
