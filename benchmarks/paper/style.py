"""The style of the figures, with the same colour for a rule everywhere, and how they are saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.results import plain
from benchmarks.paper.statistics import Band, Spread

RULE_COLOURS = {"gem": "#1f77b4", "adaptive": "#ff7f0e", "downpour": "#2ca02c", "momentum": "#444444"}
OTHERS = ("#9467bd", "#d62728", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
RULE_NAMES = {"gem": "GEM", "adaptive": "adaptive staleness", "downpour": "DOWNPOUR"}
PI_LINEAR = 1e-3  # π below this is shown on a linear scale
LOSS_LIMIT = 2.6  # a little above chance; what lies beyond has diverged


@dataclass
class Drawing:
    """A figure, and its content as plain data: by name of the panel and name of the line, the columns."""

    figure: Figure
    data: dict[str, dict[str, Any]] = field(default_factory=dict)

    def line(self, axes: Axes, panel: str, label: str, curve: Band, colour: Any, style: str = "-") -> None:
        """The mean as a line, lowest to highest seed as a band around it."""
        axes.plot(curve.x, curve.mean, style, color=colour, linewidth=1.6, label=label)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        self.data.setdefault(panel, {})[label] = {name: _plain(getattr(curve, name)) for name in ("x", "mean", "low", "high")}

    def points(
        self, axes: Axes, panel: str, label: str, x: list[float], values: list[Spread], colour: Any, scale: float = 1.0,
        style: str = "o-",
    ) -> None:  # fmt: skip
        """The means as marks joined by a line, with bars from the lowest to the highest seed. Draws nothing without values."""
        mean, low, high = (scale * np.array([getattr(each, name) for each in values]) for name in ("mean", "low", "high"))
        bars = [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]  # a mean of equal values may be rounded past them
        axes.errorbar(x, mean, bars, fmt=style, color=colour, capsize=3, markersize=5, linewidth=1.6, label=label)
        columns = {"x": x, "mean": mean, "low": low, "high": high}
        self.data.setdefault(panel, {})[label] = {name: _plain(np.array(column, float)) for name, column in columns.items()}

    def save(self, folder: Path, name: str) -> None:
        """Writes NAME.png and NAME.json."""
        folder.mkdir(parents=True, exist_ok=True)
        self.figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(self.figure)
        (folder / f"{name}.json").write_text(json.dumps(self.data, allow_nan=False, ensure_ascii=False) + "\n")


def panels(rows: int, columns: int, title: str, width: float = 4.6, height: float = 3.5) -> tuple[Drawing, list[Axes]]:
    """A drawing with that many panels, row by row."""
    plt.switch_backend("Agg")
    figure, grid = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows + 0.4), squeeze=False, constrained_layout=True
    )
    figure.suptitle(title, fontsize=12)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    return Drawing(figure), list(grid.flat)


def loss_axes(axes: Axes, title: str, x: str = "worker steps (commits / workers)", y: str = "training loss") -> None:
    """A panel with the loss over something."""
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(0, LOSS_LIMIT))
    legend(axes)


def pi_axes(axes: Axes, title: str, y: str = "median of π") -> None:
    """A panel with π over worker steps. The axis is logarithmic, and linear below `PI_LINEAR`: medians of 0 are common."""
    axes.set_yscale("symlog", linthresh=PI_LINEAR, linscale=0.3)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title=title, xlabel="worker steps (commits / workers)", ylabel=f"{y} (log scale)")
    axes.set_ylim(bottom=-PI_LINEAR / 10, top=4 * axes.get_ylim()[1])  # room for a line at 0, and for the legend
    legend(axes)


def legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def shades(count: int) -> list[Any]:
    """Colours for numbers in order: workers, κ."""
    return [colormaps["viridis"](place) for place in np.linspace(0.08, 0.85, count)]


def palette(count: int) -> list[Any]:
    """Colours for variants of GEM: the first is GEM's own."""
    return [RULE_COLOURS["gem"], *OTHERS, *colormaps["tab20"].colors][:count]  # type: ignore[attr-defined]


def _plain(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [plain(value, 5) for value in values.tolist()]
