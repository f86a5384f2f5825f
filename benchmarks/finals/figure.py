"""The figure: the held-out loss at the end by kind of cluster, of the transformer with 8 workers and 200 rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.finals import plan
from benchmarks.finals.page import MAIN, Losses, best_form, standard_error
from benchmarks.finals.runs import Outcome, Run
from benchmarks.lib.style import BLUE, GREY, MARKERS, ORANGE, RED, dots, legend, log_scale, marks, panels, styled
from benchmarks.versus.profiles import KINDS

MODEL, WORKERS, ROUNDS = MAIN
IN_STEP, ALL, EXPERT, SHORTER = (
    "this server", "DDP on all workers", "the best form of DDP that was tried (named), if it is another",
    "the best form, AdamW's averages 9/16 as long",
)  # fmt: skip
_COLOURS = {IN_STEP: BLUE, ALL: GREY, EXPERT: ORANGE, SHORTER: RED}
_LOOKS = {name: (colour, marker) for (name, colour), marker in zip(_COLOURS.items(), MARKERS, strict=False)}
_REAL = "hollow: real processes (no bar: one seed)"
_HOLLOW = Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label=_REAL)
_BAR = Line2D([], [], color=GREY, marker="|", linestyle="", label="bar: lowest to highest seed")
_WIDTH = 5.6  # inches: the README shows this figure, also on phones
_ROW, _REAL_BELOW = 0.2, 0.08  # of the distance between two clusters

Shown = dict[str, list[float]]  # losses of each seed, by profile


@styled
def figure(results: Mapping[Run, Outcome]) -> Figure:
    """A row for each contender in each cluster; what has no result is left out."""
    losses = Losses(results)
    shown = {(name, real): each for real in (False, True) for name, each in _shown(losses, real).items()}
    profiles = [profile for profile in KINDS if any(profile in each for each in shown.values())]
    title = f"Held-out loss after the time of {ROUNDS} batches,\n{MODEL}, {WORKERS} workers; bars: standard error"
    drawn, (axes,) = panels(1, 1, title, 0.68 * len(profiles) + 0.6, _WIDTH)
    _scale(axes, profiles, [loss for each in shown.values() for seeds in each.values() for loss in seeds])
    for (name, real), each in shown.items():
        _row(axes, profiles, each, name, real)
    for place, profile in enumerate(profiles):
        _name_designs(axes, place + _offset(EXPERT, False), losses, profile)
    legend(drawn, *[_HOLLOW] * any(each for (_, real), each in shown.items() if real), columns=1)
    return drawn


@styled
def number(results: Mapping[Run, Outcome]) -> Figure:
    """The loss by the batches of each worker, a line for each number of workers. Thin lines join runs of as many batches in
    all."""
    losses = Losses(results)
    found = {
        (workers, rounds): losses.best((MODEL, "equal", workers, rounds), "ours", plan.BOTH)[1]
        for workers in plan.NUMBERS
        for rounds in plan.LENGTHS
    }
    found = {place: seeds for place, seeds in found.items() if seeds}
    title = f"Held-out loss at the end, {MODEL}, equal workers"
    drawn, (axes,) = panels(1, 1, title, 3.6, _WIDTH)
    for workers, colour in zip(plan.NUMBERS, (GREY, ORANGE, BLUE), strict=True):
        own = {rounds: seeds for (number, rounds), seeds in found.items() if number == workers}
        columns = {
            "x": list(own), "mean": list(map(mean, own.values())),
            "low": list(map(min, own.values())), "high": list(map(max, own.values())),
        }  # fmt: skip
        marks(axes, columns, colour, f"{workers} worker{'s' * (workers > 1)}")
    for total in sorted({workers * rounds for workers, rounds in found}):
        line = sorted((rounds, mean(seeds)) for (workers, rounds), seeds in found.items() if workers * rounds == total)
        if len(line) > 1:
            axes.plot(*zip(*line, strict=True), ":", color=GREY, linewidth=1)
            axes.annotate(f"{total:,} batches in all", line[-1], (6, 4), textcoords="offset points", fontsize=8, color=GREY)
    axes.set(xlabel="batches that each worker makes, as a measure of time", ylabel="held-out loss")
    log_scale(axes, "x")
    axes.set_xticks(plan.LENGTHS)
    axes.set_xlim(right=3 * plan.LENGTHS[-1])
    dotted = Line2D([], [], color=GREY, linestyle=":", label="as many batches in all")
    legend(drawn, dotted, _BAR, columns=2)
    return drawn


def _shown(losses: Losses, real: bool) -> dict[str, Shown]:
    """By contender."""
    found: dict[str, Shown] = {name: {} for name in _LOOKS}
    kind = "real " if real else ""
    for profile in KINDS:
        where = (MODEL, profile, WORKERS, ROUNDS)
        name, expert = _best_design(losses, profile, real)
        for contender, seeds in (
            (IN_STEP, losses.of(*where, f"{kind}ours", plan.ours(plan.BOTH))),
            (ALL, losses.best(where, f"{kind}rounds", "")[1]),
            (EXPERT, expert if name != plan.ALL else []),
            (SHORTER, losses.best(where, f"{kind}rounds", plan.team(profile, plan.SHORTER))[1]),
        ):
            if seeds:
                found[contender][profile] = seeds
    return found


def _best_design(losses: Losses, profile: str, real: bool) -> tuple[str, list[float]]:
    """The form of DDP with the lowest mean; empty until each design that an expert would try there has a result."""
    where, kind = (MODEL, profile, WORKERS, ROUNDS), "real " if real else ""
    if not all(losses.best(where, f"{kind}rounds", team)[1] for team in plan.designs(profile, WORKERS).values()):
        return "", []
    _, settings, name = best_form(losses, where, kind=kind)
    return name, losses.of(*where, f"{kind}rounds", settings)


def _offset(name: str, real: bool) -> float:
    """How far below the middle of its cluster a contender is."""
    return (list(_LOOKS).index(name) - (len(_LOOKS) - 1) / 2) * _ROW + _REAL_BELOW * real


def _scale(axes: Axes, profiles: list[str], losses: list[float]) -> None:
    finite = [loss for loss in losses if math.isfinite(loss)] or [1.0]
    margin = 0.03 * max(finite)
    axes.set(xlim=(min(finite) - margin, max(finite) + margin), ylim=(len(profiles) - 0.5, -0.5))
    axes.set_yticks(range(len(profiles)), [f"{profile}\n{KINDS[profile].about}" for profile in profiles], fontsize=8)
    axes.set_xlabel("held-out loss at the end: lower (further left) is better;\nthe axis does not begin at 0")
    axes.grid(axis="y", visible=False)
    for place in range(0, len(profiles), 2):
        axes.axhspan(place - 0.5, place + 0.5, color=GREY, alpha=0.07, linewidth=0)


def _row(axes: Axes, profiles: list[str], shown: Shown, name: str, real: bool) -> None:
    colour, marker = _LOOKS[name]
    means, errors = [mean(seeds) for seeds in shown.values()], [standard_error(seeds) for seeds in shown.values()]
    columns = {
        "x": [profiles.index(profile) + _offset(name, real) for profile in shown],
        "mean": means,
        "low": [middle - error for middle, error in zip(means, errors, strict=True)],
        "high": [middle + error for middle, error in zip(means, errors, strict=True)],
    }
    dots(axes, columns, colour, f"_{name}" if real else name, marker, hollow=real)  # a legend leaves out names with _


def _name_designs(axes: Axes, height: float, losses: Losses, profile: str) -> None:
    """Says beside an expert's mark which design it is, and that of real processes if it is another."""
    found = {real: _best_design(losses, profile, real) for real in (False, True)}
    ends = [mean(seeds) + standard_error(seeds) for name, seeds in found.values() if seeds and name != plan.ALL]
    ends = [end for end in ends if math.isfinite(end)]
    (design, _), (other, _) = found[False], found[True]
    text = f"{design}; real: {other.removeprefix(f'{plan.BACKUP}, ')}" if other not in ("", design) else design
    if text and ends:
        axes.annotate(text, (max(ends), height), (6, 0), textcoords="offset points", va="center_baseline", fontsize=8)
