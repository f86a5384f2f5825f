"""Draws the figures of the documentation again, from stored results alone: `python -m benchmarks.figures`.

It measures nothing, and leaves the pages as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from matplotlib.figure import Figure

from benchmarks import tuning
from benchmarks.finals import figure as finals
from benchmarks.finals.runs import stored as stored_finals
from benchmarks.lib.style import save
from benchmarks.many_workers import figures as many_workers
from benchmarks.many_workers import runs as many_runs
from benchmarks.paper.content import Content
from benchmarks.paper.pictures import PICTURES
from benchmarks.peers import picture as peers
from benchmarks.peers.results import Results as PeersResults
from benchmarks.server import soak
from benchmarks.unequal_data import __main__ as unequal_data
from benchmarks.unequal_data import runs as unequal_runs
from benchmarks.versus import figure as versus
from benchmarks.versus.measure import stored as stored_versus

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"


def _many(draw: Callable[..., Figure]) -> Figure:
    return draw(many_runs.stored(RESULTS / "many-workers/runs.json"))


def _paper(name: str) -> Figure:
    return PICTURES[name](Content.load(RESULTS / f"paper/{name}.json"))


def _soak() -> Figure:
    body = json.loads((RESULTS / "soak-log.json").read_text(encoding="utf-8"))
    lines = [soak.Line(**line) for line in body["lines"]]
    return soak.draw(soak.Course(**{name: body[name] for name in ("commits", "seconds", "leases", "values")}), lines)


def _versus() -> Figure | None:
    store = stored_versus(RESULTS / "versus/results.json")
    return versus.figure(store.get, store.head["limit"])


FIGURES: dict[str, Callable[[], Figure | None]] = {
    **{f"results/paper/{name}.png": partial(_paper, name) for name in PICTURES},
    "results/many-workers/order.png": partial(_many, many_workers.order),
    "results/many-workers/energies.png": partial(_many, many_workers.energies),
    "results/many-workers/number.png": partial(_many, partial(many_workers.counts, numbers=many_runs.COUNTS)),
    "results/unequal-data/unequal-data.png": lambda: unequal_data.figure(
        unequal_runs.stored(RESULTS / "unequal-data/results.json")
    ),
    "results/versus/versus.png": _versus,
    "results/versus/finals.png": lambda: finals.figure(stored_finals(RESULTS / "versus/finals.json")),
    "results/tuning/curves.png": lambda: tuning.draw(tuning.stored()),
    "images/throughput.png": lambda: peers.figure(PeersResults.load(RESULTS / "throughput.json")),
    "images/soak.png": _soak,
}


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Draws the figures whose path under docs/ contains one of NAMES; without any, all of them."""
    for path, draw in FIGURES.items():
        if (not names or any(name in path for name in names)) and (figure := draw()) is not None:
            save(figure, DOCS / path)
            click.echo(path)


if __name__ == "__main__":
    main()
