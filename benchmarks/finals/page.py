"""The page docs/results/versus/finals.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from benchmarks.finals import plan
from benchmarks.finals.runs import Outcome, Run
from benchmarks.lib.page import filled, table
from benchmarks.versus.profiles import KINDS

Cell = tuple[object, ...]  # model, profile, workers, rounds, method, settings
_DESIGNS = tuple(dict.fromkeys(name for profile in KINDS for name in plan.designs(profile, 8)))


class Losses:
    """What came out by what was run, under each seed."""

    def __init__(self, results: Mapping[Run, Outcome]) -> None:
        self._found: dict[Cell, dict[int, Outcome]] = {}
        for run in sorted(results, key=lambda run: run.seed):
            cell = (run.model, run.profile, run.workers, run.rounds, run.method, run.settings)
            self._found.setdefault(cell, {})[run.seed] = results[run]

    def seeds(self, *cell: object) -> dict[int, Outcome]:
        """The outcome of each seed, in order."""
        return self._found.get(cell, {})

    def of(self, *cell: object) -> list[float]:
        """The held-out loss at the end of each seed, in order."""
        return [math.inf if each.loss is None else each.loss for each in self.seeds(*cell).values()]

    def right(self, *cell: object) -> str:
        """The mean share of right answers; empty if it is not known."""
        found = [each.accuracy for each in self.seeds(*cell).values() if each.accuracy is not None]
        return f", {100 * mean(found):.1f} %" if found else ""

    def best(self, where: Cell, method: str, settings: str) -> tuple[str, list[float]]:
        """The rate with the lowest mean, among those with the most seeds, and its losses; empty if there is none."""
        tried: dict[str, list[float]] = {}
        for cell in self._found:
            rate, _, rest = str(cell[5]).partition(" ")
            if cell[:5] == (*where, method) and rest == settings:
                tried[rate.removeprefix("rate=")] = self.of(*cell)
        if not tried:
            return "", []
        most = max(map(len, tried.values()))
        return min(((rate, losses) for rate, losses in tried.items() if len(losses) == most), key=lambda one: mean(one[1]))


def standard_error(losses: Sequence[float]) -> float:
    """Of the mean; 0 for one seed, NaN if a run diverged."""
    if not all(map(math.isfinite, losses)):
        return math.nan
    return stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


def text(losses: Sequence[float], rate: str = "") -> str:
    """The mean, its standard error and the number of seeds; the rate, if it was chosen."""
    if not losses:
        return ""
    if not all(map(math.isfinite, losses)):
        return "diverged"
    error = f" ± {standard_error(losses):.3f}" if len(losses) > 1 else ""
    return f"**{mean(losses):.3f}**{error} ({len(losses)}{f'; {rate}' if rate else ''})"


def write_page(results: Mapping[Run, Outcome], folder: Path) -> Path:
    """Writes the page, and returns its path."""
    losses = Losses(results)
    places = sorted({(run.model, run.workers, run.rounds) for run in results}, key=lambda place: (place[0], place[2], place[1]))
    parts = [_section(losses, *place) for place in places if place[1:] not in {*plan.WITHOUT.values(), *plan.number_alone()}]
    parts.append(_section(losses, "transformer", 8, 200, plan.CONSTANT))
    return filled(
        Path(__file__).with_name("page.txt"), folder / "finals.md",
        missing=sum(run not in results for run in plan.runs(plan.QUESTIONS)), tables="\n\n".join(filter(None, parts)),
        apart=_apart(losses), real="\n\n".join(filter(None, (_real(losses, *place) for place in places))),
        parts=_parts(losses, results), number=_number(losses),
    )  # fmt: skip


def _section(losses: Losses, model: str, workers: int, rounds: int, more: str = "") -> str:
    """The table of a place: of the runs with `more` in their settings, if given."""
    heads = ["Cluster", "before", "in step", "in step, without the slow", *_DESIGNS]
    rows = []
    for profile in KINDS:
        where, designs = (model, profile, workers, rounds), plan.designs(profile, workers)
        cells = [*(_of_this_server(losses, where, each, more) for each in (plan.TODAY, plan.BOTH))]
        cells.append("" if more else text(_without_the_slow(losses, where)))
        for name in _DESIGNS:
            cells.append(_best(losses, where, "rounds", f"{designs[name]} {more}".strip()) if name in designs else "")
        if any(cells):
            rows.append([profile, *cells])
    shown = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    rows, heads = [[row[column] for column in shown] for row in rows], [heads[column] for column in shown]
    at = ", constant rate" if more else ""
    return f"## {model}, {workers} workers, {rounds} rounds{at}\n\n" + table(heads, rows) if rows else ""


def _best(losses: Losses, where: Cell, method: str, settings: str) -> str:
    rate, found = losses.best(where, method, settings)
    return text(found, rate) + losses.right(*where, method, f"rate={rate} {settings}".strip())


def _apart(losses: Losses) -> str:
    """Others that do not wait in each step, at their best rates, beside this server."""
    rows = []
    for profile in plan.THREE:
        where = ("transformer", profile, 8, 200)
        cells = [_best(losses, where, method, settings) for method, settings in plan.APART.values()]
        if any(cells):
            rows.append([profile, _of_this_server(losses, where, plan.BOTH), *cells])
    return table(["Cluster", "in step", *plan.APART], rows)


def _real(losses: Losses, model: str, workers: int, rounds: int) -> str:
    """The table of real processes beside the simulated ones; empty if there are none."""
    rows = []
    for profile in KINDS:
        where = (model, profile, workers, rounds)
        teams = [("ours", plan.TODAY, "before"), ("ours", plan.BOTH, "in step")]
        teams += [("rounds", settings, name) for name, settings in plan.designs(profile, workers).items()]
        ddp = losses.seeds(*where, "real rounds", f"rate={losses.best(where, 'real rounds', '')[0]}")
        for method, settings, name in teams:
            rate, found = losses.best(where, f"real {method}", settings)
            whole = f"rate={rate} {settings}".strip()
            if found:
                made, simulated = losses.seeds(*where, f"real {method}", whole), losses.seeds(*where, method, whole)
                chosen = rate if method == "rounds" or model in plan.OTHER_RATES else ""
                told = text(losses.of(*where, method, whole))
                rows.append([profile, name, text(found, chosen), told, _used(made, simulated), _sooner(made, ddp)])
    heads = ["Cluster", "", "real", "simulated", "gradients", "DDP's loss at"]
    return f"### {model}, {workers} workers, {rounds} rounds\n\n" + table(heads, rows) if rows else ""


def _used(made: Mapping[int, Outcome], simulated: Mapping[int, Outcome]) -> str:
    """The gradients of real runs, as a share of those of the same simulated ones."""
    shares = [each.gradients / simulated[seed].gradients for seed, each in made.items() if seed in simulated]
    return f"{100 * mean(shares):.0f} %" if shares else ""


def _sooner(made: Mapping[int, Outcome], ddp: Mapping[int, Outcome]) -> str:
    """When the last loss of DDP on all workers was first reached, as a mean share of the time, and in how many runs."""
    goals = [(each, goal) for seed, each in made.items() if seed in ddp and (goal := ddp[seed].loss) is not None]
    first = [next((time for time, loss in out.curve if loss is not None and loss <= goal), None) for out, goal in goals]
    reached = [time / out.time for time, (out, _) in zip(first, goals, strict=True) if time is not None]
    return f"{100 * mean(reached):.0f} % ({len(reached)} of {len(goals)})" if reached else "not" if goals else ""


def _of_this_server(losses: Losses, where: Cell, settings: str, more: str = "") -> str:
    """At one rate for all clusters; the best of several, as the rivals, if one has not been chosen for such a training."""
    if where[0] in plan.OTHER_RATES or more:
        return _best(losses, where, "ours", f"{settings} {more}".strip())
    return text(losses.of(*where, "ours", plan.ours(settings)))


def _without_the_slow(losses: Losses, where: Cell) -> list[float]:
    """Of this server in step, on the fast workers alone; empty if that was not run."""
    model, profile, workers, rounds = where
    if (workers, rounds) != (8, 200) or profile not in plan.WITHOUT:
        return []
    return losses.of(model, "equal", *plan.WITHOUT[str(profile)], "ours", plan.ours(plan.BOTH))


def _number(losses: Losses) -> str:
    """The table of the number of workers and the length of the run."""
    found = {
        (workers, rounds): losses.best(("transformer", "equal", workers, rounds), "ours", plan.BOTH)
        for workers in plan.NUMBERS
        for rounds in plan.LENGTHS
    }
    alone = {rounds: mean(found[1, rounds][1]) for rounds in plan.LENGTHS if found[1, rounds][1]}
    rows = []
    for workers in plan.NUMBERS:
        cells = []
        for rounds in plan.LENGTHS:
            rate, seeds = found[workers, rounds]
            sooner = f", {_as_long(alone, mean(seeds)) / rounds:.1f} times sooner" if seeds and workers > 1 and alone else ""
            cells.append(text(seeds, rate) + sooner)
        rows.append([workers, *cells])
    return table(["Workers", *(f"{each:,} batches of each" for each in plan.LENGTHS)], rows)


def _as_long(alone: Mapping[int, float], loss: float) -> float:
    """The batches after which one worker is as good."""
    batches = sorted(alone, reverse=True)  # from the lowest loss on, as `interp` wants them
    return float(np.exp(np.interp(loss, [alone[each] for each in batches], np.log(batches))))


def _parts(losses: Losses, results: Iterable[Run]) -> str:
    tried = dict.fromkeys(run.settings for run in results if run.method == "ours")
    heads = ["What is different", *plan.HARD]
    rows = [
        [name, *(text(losses.of("transformer", profile, 8, 200, "ours", settings)) for profile in plan.HARD)]
        for name, settings in ((plan.named(each), each) for each in tried)
        if name
    ]
    return table(heads, [row for row in rows if any(row[1:])])
