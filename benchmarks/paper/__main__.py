"""Runs the missing experiments, draws the existing results, writes the page: `python -m benchmarks.paper`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
from gem_api.process.lifetime import interruptible

from benchmarks.lib.runs import make_missing
from benchmarks.paper import page
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.pictures import draw_figure
from benchmarks.paper.plan import FIGURES, Scale, experiments, quick
from benchmarks.paper.results import Result, stored
from benchmarks.paper.runner import make
from benchmarks.paper.statistics import gather

_OUT, _QUICK_OUT = Path("docs/results/paper"), Path("runs/paper-quick")
_DIGITS_NOTE = (
    "A quick look on scikit-learn's 1,797 digits instead of MNIST, because no --data was given: "
    "these are not the paper's experiments."
)
_QUICK_NOTE = "A quick look: fewer workers, steps and seeds than the paper has, so claims about many workers may not show."


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("figures", nargs=-1, type=click.Choice(list(FIGURES)))
@click.option(
    "--data", type=click.Path(exists=True, path_type=Path), help="Folder of MNIST's four IDX files, plain or gzipped."
)
@click.option("--quick", "is_quick", is_flag=True,
              help=f"Two numbers of workers, 150 steps, one seed: about twelve minutes, in {_QUICK_OUT}.")  # fmt: skip
@click.option("--draw-only", is_flag=True, help="Run nothing; draw what is stored, and describe existing runs.")
@interruptible()
def main(figures: tuple[str, ...], data: Path | None, is_quick: bool, draw_only: bool) -> None:
    """Makes the runs of the paper's FIGURES, by default of all of them. Then draws every figure that has results. Ctrl-C ends
    it; the same command continues later."""
    chosen = list(dict.fromkeys(figures)) or list(FIGURES)
    folder = _QUICK_OUT if is_quick else _OUT
    store = stored(folder)
    if draw_only and not store:
        for name in chosen:  # from their stored content; the page stays as it is: it needs the runs
            draw_figure(name, [], folder)
        return
    if data is None and not (is_quick or draw_only):
        raise click.UsageError("give --data DIR, the folder of MNIST's four IDX files; with --quick it can be left out")
    task = "digits" if data is None and is_quick else "mnist"
    scale = quick(task) if is_quick else Scale(task)
    note = _DIGITS_NOTE if task == "digits" else _QUICK_NOTE if is_quick else ""
    wanted = () if draw_only else experiments(chosen, scale)
    click.echo(f"{len(wanted)} experiments, {sum(each not in store for each in wanted)} of them to run")
    make_missing(((store, each, partial(make, each, data)) for each in wanted), lambda: draw(store, folder, scale, note))


def draw(results: Mapping[Experiment, Result], folder: Path, scale: Scale, note: str) -> Path:
    """Draws every figure that has results, and writes the page. Returns the page's path."""
    states = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, groups_of in FIGURES.items():
        groups = groups_of(scale)
        measured = gather(groups, results.get)
        # A figure with only a few lines, which others share, is left out.
        enough = name == "beyond" or 2 * len(measured) > len(groups)
        states[name] = page.State(measured if enough else [], sum(len(group.experiments) for group in groups), tuple(measured))
        draw_figure(name, states[name].measured, folder)
    return page.write(folder, scale, states, note)


if __name__ == "__main__":
    main()
