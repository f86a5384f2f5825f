"""Makes the runs that have no result yet, then the page: `python -m benchmarks.unequal_data --data DIR`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from gem_worker.tasks import load_task
from matplotlib.figure import Figure

from benchmarks.lib.page import filled, table
from benchmarks.lib.runs import Wanted, study
from benchmarks.lib.style import BAND, BLUE, GREY, dots, legend, panels, save, styled
from benchmarks.paper.statistics import columns, spread
from benchmarks.unequal_data.runs import (
    GRADIENTS,
    METHODS,
    RARE,
    SEEDS,
    SLOWER,
    WORKERS,
    Case,
    Digits,
    Outcome,
    measure,
    reported,
    stored,
    wanted,
)  # fmt: skip

RESULTS = Path(__file__).parents[2] / "docs/results/unequal-data"
_KINDS = (
    ("rare", f"digits {' and '.join(map(str, RARE))}, which only the last worker has", BLUE, "o"),
    ("accuracy", "all digits", GREY, "D"),
)
_SHIFT = 0.15  # of a row, by which the two are moved apart


def plan(slower: Sequence[str], data: Path | None) -> Wanted:
    if data is None:
        return
    task, store = load_task("mnist", data), stored(RESULTS / "results.json")
    digits = Digits(task)
    for case in wanted(map(int, slower), store):
        yield store, case, partial(measure, case, task, digits)


@styled
def figure(known: Mapping[Case, Outcome]) -> Figure:
    """A panel for each slowness of the last worker, and a row for each method."""
    title = f"Held-out accuracy, if one of {WORKERS} workers is slow and has digits of its own"
    drawn, places = panels(1, len(SLOWER), title, 2.9, sharex=True, sharey=True)
    places[0].set(xlim=(-5, 105), yticks=range(len(METHODS)), yticklabels=[method.label for method in METHODS.values()])
    places[0].invert_yaxis()
    for axes, slower in zip(places, SLOWER, strict=True):
        for (column, label, colour, marker), shift in zip(_KINDS, (-_SHIFT, _SHIFT), strict=True):
            found = {row: one[1] for row, name in enumerate(METHODS) if (one := reported(known, name, slower))}
            values = [spread(getattr(each, column) for each in outcomes) for outcomes in found.values()]
            dots(axes, columns([row + shift for row in found], values, 100), colour, label, marker)
        name = "all equally fast" if slower == 1 else f"the last {slower} times slower"
        axes.set(title=name, xlabel="held-out accuracy, %")
    legend(drawn, BAND)
    return drawn


def draw(folder: Path) -> Path:
    """Writes README.md and its picture, as far as the results for them are there. Returns the page's path."""
    known = stored(folder / "results.json")
    save(figure(known), folder / "unequal-data.png")
    missing = sum((one := reported(known, *cell)) is None or len(one[1]) < len(SEEDS) for cell in product(METHODS, SLOWER))
    return filled(
        Path(__file__).with_name("page.txt"), folder / "README.md",
        table=_table(known), gradients=f"{GRADIENTS:,}", workers=WORKERS, seeds=len(SEEDS),
        missing=f" **{missing} of {len(METHODS) * len(SLOWER)} cells lack seeds.**" if missing else "",
    )  # fmt: skip


def _table(known: Mapping[Case, Outcome]) -> str:
    degrees = ["equally fast" if slower == 1 else f"{slower} times slower" for slower in SLOWER]
    rows = []
    for name, method in METHODS.items():
        found = [reported(known, name, slower) for slower in SLOWER]
        rare = [_percent([each.rare for each in one[1]]) if one else "–" for one in found]
        last = found[-1]
        total = _percent([each.accuracy for each in last[1]]) if last else "–"
        rows.append([method.label, *rare, total, ", ".join(f"{one[0]:g}" if one else "–" for one in found)])
    return table(["Method", *(f"8 and 9: {each}" for each in degrees), "all digits, ten times slower", "rates"], rows)


def _percent(values: list[float]) -> str:
    mean, low, high = (100 * each(values) for each in (np.mean, min, max))
    return f"{mean:.0f} ({low:.0f}–{high:.0f})" + (f", {len(values)} seeds" if len(values) < len(SEEDS) else "")


about = "Makes the runs without a result for these slownesses, if --data names MNIST, then the page. All take five hours."
main = study(about, map(str, reversed(SLOWER)), plan, draw, RESULTS)

if __name__ == "__main__":
    main()
