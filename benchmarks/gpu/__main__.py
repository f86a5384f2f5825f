"""Checks this project on one GPU: `python -m benchmarks.gpu --help` has more."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from importlib import import_module

import click

from benchmarks.gpu.sections import SECTIONS, Runner, as_line


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True)
@click.option("--quick", is_flag=True, help="Tiny models and short measurements: tries out the checks.")
@click.option("--only", default=",".join(SECTIONS), show_default=True, help="The sections, with commas.")
@click.option("--match", default="", metavar="PATTERN", help="Only checks in whose name this pattern occurs.")
@click.option("--table", is_flag=True, help="Check nothing: draw the page of the stored lines.")
@click.option("--section", hidden=True, help="Run this module's section in this process.")
@click.option("--seconds", type=float, hidden=True, help="The limit of that section.")
def main(device: str, quick: bool, only: str, match: str, table: bool, section: str | None, seconds: float) -> None:
    """Checks this project on one GPU, and measures it: prints one line of JSON for each check, and a summary. At most nine
    minutes on an H100 with 16 cores; `--device cpu --quick` takes some minutes on two cores.

    The sections: a, packages and machine; b, equality with plain loops; c, four workers on the GPU, of which one is killed; d,
    time and memory of a step; f, commits a second; g, a training to its end in simulated time.
    """
    if section is not None:
        _run_section(section, device, quick, seconds, match)
        return
    if table:
        from benchmarks.gpu.page import RESULTS, draw

        click.echo(f"results: {draw(RESULTS)}")
        return
    if unknown := set(only.split(",")) - SECTIONS.keys():
        raise click.BadParameter(f"no section {min(unknown)!r}: there are {', '.join(SECTIONS)}", param_hint="--only")
    try:
        re.compile(match)
    except re.error as error:
        raise click.BadParameter(f"{match!r} is no regular expression: {error}", param_hint="--match") from None
    began, runner = (
        time.monotonic(),
        Runner([f"--device={device}", f"--match={match}", *["--quick"] * quick], device == "cuda", click.echo),
    )
    try:
        asyncio.run(runner.run({name: section for name, section in SECTIONS.items() if name in only.split(",")}))
    except asyncio.CancelledError:
        raise click.Abort from None
    failed, skipped = ([check for check, ok in runner.outcomes if ok is outcome] for outcome in (False, None))
    summary = {"ok": not failed, "checks": len(runner.outcomes), "failed": failed, "skipped": skipped}
    click.echo(as_line("summary", **summary, seconds=round(time.monotonic() - began, 1)))
    sys.exit(1 if failed else 0)


def _run_section(module: str, device: str, quick: bool, seconds: float, match: str) -> None:
    """Runs a section in this process. Only its lines reach the standard output, which no process that it starts holds."""
    from benchmarks.gpu.checks import Checks

    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import_module(module).run(Checks(device, quick, seconds, match, lambda line: click.echo(line, file=lines)))


if __name__ == "__main__":
    main()
