"""Makes the runs that have no result yet. What is done stays, whatever becomes of the rest: the same command continues."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED, interruptible
from gem_worker.tasks import TaskError

from benchmarks.lib.launch import RunFailed

R = TypeVar("R")
Missing = Callable[[Sequence[str], Path | None], Iterable[tuple[str, Callable[[], str]]]]


def study(about: str, parts: Iterable[str], missing: Missing, draw: Callable[[], Path]) -> click.Command:
    """The command of a study: it makes the runs of its parts that have no result, then draws its page.

    Args:
        about: Its help.
        parts: The names of its parts.
        missing: The missing runs of some parts: the name of each, and what makes and saves it and says what came out. Its other
            argument is the folder of MNIST's files; None: runs with MNIST are left out.
        draw: Draws what has results, and returns the page.
    """
    known = list(parts)

    @click.command(help=f"{about}\n\nA result is saved at once, so several processes may make different PARTS [all].",
                   context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
    @interruptible()
    @click.argument("parts", nargs=-1, type=click.Choice(known))
    @click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of MNIST's four files.")
    @click.option("--draw-only", is_flag=True, help="Make no runs.")
    def main(parts: tuple[str, ...], data: Path | None, draw_only: bool) -> None:
        import torch

        torch.set_num_threads(1)
        try:
            make_missing(() if draw_only else missing(parts or known, data), lambda make: make(), draw)
        except TaskError as error:
            raise click.ClickException(str(error)) from None

    return main


def settings_of(text: str) -> dict[str, Any]:
    """The settings in a text such as "rate=0.003 overlap=True"."""
    return {name: _value(value) for name, _, value in (each.partition("=") for each in text.split())}


def _value(text: str) -> Any:
    words: dict[str, Any] = {"True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text


def make_missing(missing: Iterable[tuple[str, R]], make: Callable[[R], str], draw: Callable[[], Path]) -> None:
    """Makes the runs one after the other, and draws what there is then. Ends the command with another status than 0 if it was
    interrupted, or if a run left no result; the others are made all the same.

    Args:
        missing: The runs to make, each with its name.
        make: Makes a run, saves its result, and says in a line what came out. Raises RunFailed or TaskError.
        draw: Draws what has results, and returns the page.
    """
    failures: dict[str, str] = {}
    try:
        for name, run in missing:
            click.echo(name)
            began = time.monotonic()
            try:
                click.echo(f"  {make(run)}, {time.monotonic() - began:.0f} s")
            except (RunFailed, TaskError) as error:
                failures[name] = str(error)
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
