"""The command: makes the missing runs stage by stage, draws what there is, writes the page."""

from __future__ import annotations

from pathlib import Path

import click
from gem_api.process.lifetime import interruptible

from benchmarks.lib.results import DamagedError, Store
from benchmarks.lib.runs import make_missing
from benchmarks.models import figures, page
from benchmarks.models.measure import measure, require_same_text, stored
from benchmarks.models.plan import STAGES, missing
from benchmarks.models.runs import Outcome, Run

_OUT = Path("docs/results/models")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("stages", nargs=-1)
@click.option("--mnist", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder of MNIST's four IDX files, plain or gzipped. Without it MNIST's stages are left out.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=_OUT,
              help="Folder for results.json, plots and page; runs whose results are in it are not repeated.")  # fmt: skip
@click.option("--draw-only", is_flag=True, help="Run nothing; draw and describe the existing results.")
@interruptible()
def main(stages: tuple[str, ...], mnist: Path | None, out: Path, draw_only: bool) -> None:
    """Compares optimizers under 1 to 32 workers. STAGES are some of rates-16 rates-4 rates-32 rates-1 alone seeds-16 seeds-4
    seeds-32 seeds-1 seeds-alone kappa mnist seeds-mnist seeds-kappa; without any, all of them in this order, which takes
    hours. A stage needs the results of those that choose its learning rates. Ctrl-C ends it; the same command continues
    later."""
    names = _chosen(stages, mnist)
    try:
        store = stored(out / "results.json")
        if not draw_only:
            require_same_text(store)
    except DamagedError as error:
        raise click.ClickException(str(error)) from None
    runs = () if draw_only else missing(names, store.get)
    named = ((f"[{stage}] {run.name}", run) for stage, run in runs)

    def make(run: Run) -> str:
        store.add(run, outcome := measure(run, mnist))
        return f"{outcome.outcome}, held-out loss {outcome.loss:.4f}"

    make_missing(named, make, lambda: _draw(out, store))


def _draw(out: Path, store: Store[Run, Outcome]) -> Path:
    """Draws every plot that has results, and writes the page. Returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    return page.write(out, store.get, store.head["conditions"] if store else {}, figures.draw(out, store.get))


def _chosen(given: tuple[str, ...], mnist: Path | None) -> list[str]:
    """The stages to run, in their order. Raises UsageError."""
    for name in given:
        if name not in STAGES:
            raise click.UsageError(f"there is no stage {name!r}: choose from {', '.join(STAGES)}")
        if "mnist" in name and mnist is None:
            raise click.UsageError(f"stage {name} needs --mnist DIR, the folder of MNIST's four IDX files")
    return [name for name in STAGES if (name in given or not given) and (mnist is not None or "mnist" not in name)]
