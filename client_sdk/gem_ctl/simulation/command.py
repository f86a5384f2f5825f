"""gem-ctl simulate."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
from gem_api.process.extras import install
from gem_api.process.options import Number, Whole, WithHeadings, option

from gem_ctl.amounts import BitsPerSecond, Counts
from gem_ctl.plan_command import costs, run_options, setup
from gem_ctl.simulation.outcome import MAX_COMMITS
from gem_ctl.simulation.scenario import Scenario, Slow
from gem_ctl.simulation.study import Bounds, Study, study
from gem_ctl.simulation.table import show

_MAX_FACTOR = 1000
_PICTURES = (".png", ".svg", ".pdf")


class _Slow(click.ParamType[Slow]):
    """A share of the workers, and how many times as long they compute: 10%:5."""

    name = "share:factor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Slow:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%:(\d+(?:\.\d+)?)", str(value).strip())
        share, factor = (float(match[1]) / 100, float(match[2])) if match else (0.0, 0.0)
        if not (0 <= share <= 1 and 1 <= factor <= _MAX_FACTOR):
            self.fail(f"{value!r} is not a share of the workers and a factor from 1 to {_MAX_FACTOR}; write 10%:5", param, ctx)
        return Slow(share, factor)


class _Picture(click.Path):
    """A file for a picture, whose format is its ending."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix.lower() not in _PICTURES:
            self.fail(f"{str(value)!r} does not end in {', '.join(_PICTURES)}", param, ctx)
        if not os.access(path.parent, os.W_OK):  # said now: a simulation may take a while
            self.fail(f"can't write {path}: there is no folder {path.parent} that you may write to", param, ctx)
        return path


@click.command("simulate", cls=WithHeadings, short_help="Simulates speed, staleness and queue of a run.")
@run_options(
    option(
        "--workers",
        type=Counts("workers", 1_000_000),
        default="10,100,1000",
        help="Numbers of workers to simulate, with commas between them.",
    )
)
@option("--spread", type=Number(0, 1), default=0.1, help="Standard deviation of the time of a step, relative to its mean.")
@option("--slow", type=_Slow(), multiple=True, help="Slower workers: 10%:5 are a tenth that compute 5 times as long.")
@option("--latency", type=Number(0, 1e6), default=0.0, help="Seconds between a worker and a server, one way.")
@option(
    "--bandwidth", type=BitsPerSecond(), help="Bits per second of each machine's link, such as 10G.", show_default="no limit"
)
@option(
    "--server-spread",
    type=Number(0, 1),
    default=0.0,
    help="Standard deviation of a server's time for a commit, relative to its mean.",
)
@option(
    "--server-load",
    type=Number(0.01, 0.99),
    help="Share of the time that each server may be busy, such as 0.9, to see how many servers are needed.",
)
@option("--seed", type=Whole(0), default=0, help="Seed of the random numbers.")
@option(
    "--commits",
    type=Whole(1000, 10_000_000),
    default=MAX_COMMITS,
    help="Maximum number of commits in each simulation.",
)
@option("--plot", type=_Picture(dir_okay=False), help="Draw the results too, as .png, .svg or .pdf.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def simulate_run(
    workers: tuple[int, ...], server_memory: int | None, server_load: float | None, spread: float, server_spread: float,
    slow: tuple[Slow, ...], latency: float, bandwidth: float | None, seed: int, commits: int, plot: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Simulates a run in time: workers compute, send commits, wait in the server's queue and get answers. It trains nothing.

    It shows what gem-ctl plan shows, and also staleness τ, the queue (commits that wait, without the one being applied), how
    long a commit waits in it, the share of the time in which workers do not compute ("idle"), and workers of different
    speeds. 100,000 workers take some seconds. The costs of a commit are those of gem-ctl plan.

    \b
    Examples:
      gem-ctl simulate --parameters 25M --compute-seconds 0.3
      gem-ctl simulate --parameters 1M --workers 10,100,1k,10k --plot out.png
      gem-ctl simulate --parameters 1M --slow 10%:5 --bandwidth 10G
    """
    if sum(group.share for group in slow) > 1 + 1e-9:
        raise click.UsageError("the shares of --slow are more than 100 % together")
    if options["shared_memory"] and (latency or bandwidth):
        raise click.UsageError("shared memory has no network: leave out --shared-memory, or --latency and --bandwidth")
    measured = costs(options)
    described = setup(bool(server_memory or server_load), workers=workers[0], **options)
    scenario = Scenario(described, measured, spread, server_spread, slow, latency, bandwidth or 0.0)
    result = study(scenario, workers, Bounds(server_memory, server_load), seed, commits)
    click.echo(json.dumps(result.as_json(), indent=2, allow_nan=False) if as_json else show(result))
    if plot:
        _draw(result, plot)


def _draw(result: Study, path: Path) -> None:
    try:
        from gem_ctl.simulation.plot import draw
    except ImportError as error:
        raise click.ClickException(f"plots need Matplotlib: {install('report')} ({error})") from error
    try:
        draw(result, path)
    except OSError as error:
        raise click.ClickException(f"can't write {path}: {error}") from error
    click.echo(f"wrote {path}", err=True)
