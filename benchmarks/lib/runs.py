"""Makes the runs that have no result yet. What is done stays, whatever becomes of the rest: the same command continues."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED, interruptible
from gem_worker.tasks import TaskError

from benchmarks.lib.launch import RunFailed
from benchmarks.lib.results import Store

# A run: where its result is kept, its settings, and what makes it. Raises RunFailed or TaskError.
Wanted = Iterable[tuple[Store[Any, Any], Any, Callable[[], Any]]]
# The runs of some parts of a study. The other argument is the folder of MNIST's files; None: runs with MNIST are left out.
Plan = Callable[[Sequence[str], Path | None], Wanted]


def study(
    about: str, parts: Iterable[str], plan: Plan, draw: Callable[[Path], Path], folder: Path, real: Plan | None = None
) -> click.Command:
    """The command of a study: it makes the runs of its parts that have no result, then draws its page.

    Args:
        about: Its help.
        parts: The names of its parts.
        plan: The runs, in the order of making.
        draw: Draws in a folder what has results, and returns the page.
        folder: The folder.
        real: The runs with real processes, if there are any besides those simulated.
    """
    known = list(parts)

    @click.command(help=f"{about}\n\nA result is saved at once, so several processes may make different PARTS [all].",
                   context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
    @interruptible()
    @click.argument("parts", nargs=-1, type=click.Choice(known))
    @click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of MNIST's four files.")
    @click.option("--real", "is_real", is_flag=True, hidden=real is None, help="Make runs with real processes instead.")
    @click.option("--draw-only", is_flag=True, help="Make no runs.")
    def main(parts: tuple[str, ...], data: Path | None, is_real: bool, draw_only: bool) -> None:
        import torch

        torch.set_num_threads(1)
        chosen = real if is_real and real else plan
        try:
            make_missing(() if draw_only else chosen(parts or known, data), lambda: draw(folder))
        except TaskError as error:
            raise click.ClickException(str(error)) from None

    return main


def make_missing(wanted: Wanted, draw: Callable[[], Path]) -> None:
    """Makes the runs without a result one after the other, and draws what there is then. A result is saved at once. Ends the
    command with another status than 0 if it was interrupted, or if a run left no result; the others are made all the same."""
    failures: dict[str, str] = {}
    try:
        for store, key, make in wanted:
            if key in store:
                continue
            click.echo(key)
            began = time.monotonic()
            try:
                click.echo(f"  {store.add(key, make())}, {time.monotonic() - began:.0f} s")
            except (RunFailed, TaskError) as error:
                failures[str(key)] = str(error)
                click.echo(f"  no result: {error}")
    except KeyboardInterrupt:
        click.echo("\nstopped; the same command continues", err=True)
        sys.exit(EXIT_INTERRUPTED)
    finally:
        click.echo(f"results: {draw()}")
    if failures:
        click.echo(f"{len(failures)} runs left no result; the same command tries them again:", err=True)
        for name, why in failures.items():
            click.echo(f"  {name}: {why}", err=True)
        sys.exit(1)
