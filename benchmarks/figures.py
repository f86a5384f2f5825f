"""Draws the pages of the studies and the figures of the documentation again, from stored results alone:
`python -m benchmarks.figures`. It measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from benchmarks import tuning
from benchmarks.finals import __main__ as finals
from benchmarks.gpu import page as gpu
from benchmarks.lib.style import save
from benchmarks.many_workers import __main__ as many_workers
from benchmarks.paper.pictures import PICTURES, draw_figure
from benchmarks.peers import picture as peers
from benchmarks.peers.results import stored
from benchmarks.server import soak
from benchmarks.unequal_data import __main__ as unequal_data

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"


def _paper() -> None:
    for name in PICTURES:
        draw_figure(name, [], RESULTS / "paper")


def _soak() -> None:
    body = json.loads((RESULTS / "soak-log.json").read_text(encoding="utf-8"))
    lines = [soak.Line(**line) for line in body["lines"]]
    course = soak.Course(**{name: body[name] for name in ("commits", "seconds", "leases", "values")})
    save(soak.draw(course, lines), DOCS / "images/soak.png")


FIGURES: dict[str, Callable[[], object]] = {
    **{each.RESULTS.name: partial(each.draw, each.RESULTS) for each in (finals, many_workers, unequal_data, tuning)},
    "paper": _paper,
    "gpu": partial(gpu.draw, gpu.RESULTS),
    "throughput": lambda: save(peers.figure(stored(RESULTS / "throughput.json")), DOCS / "images/throughput.png"),
    "soak": _soak,
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(FIGURES)))
def main(names: tuple[str, ...]) -> None:
    """Draws the NAMES, by default all."""
    for name in names or FIGURES:
        FIGURES[name]()
        click.echo(name)


if __name__ == "__main__":
    main()
