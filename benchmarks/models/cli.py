"""The command: makes the missing runs stage by stage, draws what there is, writes the page."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED, interruptible

from benchmarks.launch import RunFailed
from benchmarks.models.measure import measure
from benchmarks.models.plan import STAGES, missing
from benchmarks.models.runs import Run
from benchmarks.models.store import Store, StoreError

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
        store = Store(out / "results.json")
        failures = {} if draw_only else _measure(names, store, mnist)
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        click.echo("\nstopped; the same command continues", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if failures:
        click.echo(f"{len(failures)} runs left no result; the same command tries them again:", err=True)
        for run, why in failures.items():
            click.echo(f"  {run.name}: {why}", err=True)
        sys.exit(1)


def _measure(names: list[str], store: Store, mnist: Path | None) -> dict[Run, str]:
    """Makes the missing runs of the stages; returns those that left no result, with the reason. Raises StoreError."""
    store.require_same_text()
    failures: dict[Run, str] = {}
    for stage, run in missing(names, store.result):
        click.echo(f"[{stage}] {run.name}")
        try:
            outcome = measure(run, mnist)
        except RunFailed as error:
            failures[run] = str(error)
            click.echo(f"  no result: {error}")
            continue
        store.add(run, outcome)
        click.echo(f"  {outcome.outcome}, held-out loss {outcome.loss:.4f}, {outcome.seconds:.0f} s")
    return failures


def _chosen(given: tuple[str, ...], mnist: Path | None) -> list[str]:
    """The stages to run, in their order. Raises UsageError."""
    for name in given:
        if name not in STAGES:
            raise click.UsageError(f"there is no stage {name!r}: choose from {', '.join(STAGES)}")
        if "mnist" in name and mnist is None:
            raise click.UsageError(f"stage {name} needs --mnist DIR, the folder of MNIST's four IDX files")
    return [name for name in STAGES if (name in given or not given) and (mnist is not None or "mnist" not in name)]
