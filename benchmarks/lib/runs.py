"""Makes the runs that have no result yet. What is done stays, whatever becomes of the rest: the same command continues."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import click
from gem_api.process.lifetime import EXIT_INTERRUPTED
from gem_worker.tasks import TaskError

from benchmarks.lib.launch import RunFailed

R = TypeVar("R")


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
