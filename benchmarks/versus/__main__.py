"""Makes the missing runs, most valuable first, draws what there is, writes the page: `python -m benchmarks.versus`."""

from __future__ import annotations

from pathlib import Path

import click
from gem_api.process.lifetime import interruptible

from benchmarks.lib import wire
from benchmarks.lib.results import DamagedError, Store
from benchmarks.lib.runs import make_missing
from benchmarks.versus import figure, page
from benchmarks.versus.contenders import contenders
from benchmarks.versus.measure import exchanges, measure, measure_exchange, stored
from benchmarks.versus.models import GOALS
from benchmarks.versus.outcome import Outcome, Run
from benchmarks.versus.plan import QUICK_RATES, RATE_PROFILE, Case, Choice, missing
from benchmarks.versus.profiles import PROFILES

_OUT, _QUICK_OUT = Path("docs/results/versus"), Path("runs/versus-quick")
_QUICK_PROFILES = ("equal", "noisy", "straggler")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True,
              help="A rough look in ten minutes: the transformer, 8 workers, three profiles, one seed.")  # fmt: skip
@click.option("--only", multiple=True, type=click.Choice([name for name, each in contenders().items() if each.start]),
              help="Contenders to run.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for results.json, figure and page; runs whose results are in it are not repeated.  "
              f"[default: {_OUT}; with --quick {_QUICK_OUT}]")  # fmt: skip
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder of MNIST's four IDX files. Without it the convnet is left out.")  # fmt: skip
@click.option("--overhead", "only_exchanges", is_flag=True, help="Measure only what an exchange costs; takes minutes.")
@click.option("--draw-only", is_flag=True, help="Run nothing; draw and describe the existing results.")
@interruptible()
def main(
    quick: bool, only: tuple[str, ...], out: Path | None, data: Path | None, only_exchanges: bool, draw_only: bool
) -> None:
    """Measures how soon each contender reaches a held-out loss, in kinds of clusters that real processes with simulated compute
    times stand for. Ctrl-C ends it; the same command continues later."""
    if quick:
        choice = Choice(only or tuple(QUICK_RATES), ("transformer",), _QUICK_PROFILES, (8,), 1, quick=True)
    else:
        choice = Choice(only, tuple(name for name in GOALS if data or name != "convnet"))
    out = out or (_QUICK_OUT if quick else _OUT)
    try:
        store = stored(out / "results.json")
    except DamagedError as error:
        raise click.ClickException(str(error)) from None
    if only_exchanges:
        _measure_exchanges(out, store, choice, data)
    else:
        _make_runs(out, store, choice, data, nothing=draw_only)


def _make_runs(out: Path, store: Store[Run, Outcome], choice: Choice, data: Path | None, nothing: bool) -> None:
    """Makes the missing runs, or only draws."""

    def make(run: Run) -> str:
        store.add(run, outcome := measure(run, data))
        reached = ", ".join("not" if units is None else f"after {units:.1f} units" for units in outcome.units)
        return f"losses reached {reached}; lowest {outcome.lowest}{', diverged' if outcome.diverged else ''}"

    runs = () if nothing else ((run.name, run) for run in missing(choice, store.get, _skipped(choice)))
    make_missing(runs, make, lambda: _draw(out, store, choice))


def _skipped(choice: Choice) -> list[str]:
    """The wanted profiles that this machine can't have; says so."""
    linked = [name for name in choice.kinds() if PROFILES[name].far]
    if not linked or wire.possible():
        return []
    click.echo(f"profile {', '.join(linked)} is left out: its slow link needs Linux, root and /dev/net/tun", err=True)
    return linked


def _draw(out: Path, store: Store[Run, Outcome], choice: Choice) -> Path:
    """Draws what has results, and writes the page. Returns the page's path."""
    drawn = figure.draw(out, store.get, store.head["limit"])
    return page.write(out, store.get, store.head, choice, drawn, exchanges(out))


def _measure_exchanges(out: Path, store: Store[Run, Outcome], choice: Choice, data: Path | None) -> None:
    """Measures each exchange that has no figure yet."""
    found = exchanges(out)

    def make(case: Case) -> str:
        found.add(case, milliseconds := measure_exchange(case.run(RATE_PROFILE, 1e-6, 0), data))
        return f"{milliseconds:.1f} ms"

    cases = [case for group in choice.groups() for case in group if case not in found]
    named = ((f"{case.model}, {case.workers} workers: exchange of {case.contender}", case) for case in cases)
    make_missing(named, make, lambda: _draw(out, store, choice))


if __name__ == "__main__":
    main()
