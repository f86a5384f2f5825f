"""The page docs/results/versus/finals.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from scipy.stats import t as student

from benchmarks.finals import plan
from benchmarks.finals.runs import Outcome, Run
from benchmarks.lib.page import filled, table
from benchmarks.versus.profiles import KINDS

Cell = tuple[object, ...]  # model, profile, workers, rounds, method, settings
MAIN = ("transformer", 8, 200)  # what most runs are of: model, workers, rounds
FOUR = ("equal", "mixed", "exponential", "straggler")  # the kinds with runs of other places and parts
_SHORT = {plan.ALL: "all", plan.FAST: "fast", plan.PROPORTION: "proportion"}
_ELSEWHERE = {  # model, workers, rounds, what all settings have besides, kind of run, DDP's memory
    "50 rounds": ("transformer", 8, 50, "", "", ""),
    "400 rounds": ("transformer", 8, 400, "", "", ""),
    "1,000 rounds": ("transformer", 8, 1000, "", "", ""),
    "3,000 rounds": ("transformer", 8, 3000, "", "", ""),
    "2 workers": ("transformer", 2, 200, "", "", ""),
    "4 workers": ("transformer", 4, 200, "", "", ""),
    "16 workers": ("transformer", 16, 200, "", "", ""),
    "32 workers": ("transformer", 32, 200, "", "", ""),
    "constant rate": ("transformer", 8, 200, plan.CONSTANT, "", ""),
    "constant rate, shorter memory": ("transformer", 8, 200, plan.CONSTANT, "", plan.SHORTER),
    "1,090,848 parameters": ("large", 8, 200, "", "", ""),
    "convolutional network, MNIST": ("convnet", 8, 200, "", "", ""),
    "tagger": ("tagger", 8, 200, "", "", ""),
    "graph network": ("trees", 8, 200, "", "", ""),
    "real processes": (*MAIN, "", "real ", ""),
}
_DESIGNS = (plan.ALL, plan.FAST, plan.PROPORTION, plan.BACKUP)
_SHARES = {"DDP": ("1", "0.56", "0.25", "0.13"), "this server": ("1", "0.56", "0.34", "0.23")}  # of the usual memory


class Losses:
    """What came out by what was run, under each seed. Of real processes the better of two lengths of the schedule counts."""

    def __init__(self, results: Mapping[Run, Outcome]) -> None:
        self._found: dict[Cell, dict[int, Outcome]] = {}
        for run in sorted(results, key=lambda run: run.seed):
            cell = (run.model, run.profile, run.workers, run.rounds, run.method, run.settings)
            self._found.setdefault(cell, {})[run.seed] = results[run]
        for made, seeds in list(self._found.items()):
            if str(made[4]).startswith("cut "):
                whole = (*made[:4], str(made[4]).replace("cut ", "real "), made[5])
                cut, known = self.of(*made), self.of(*whole)
                if len(cut) > len(known) or (len(cut) == len(known) and mean(cut) < mean(known)):
                    self._found[whole] = seeds

    def seeds(self, *cell: object) -> dict[int, Outcome]:
        """The outcome of each seed, in order."""
        return self._found.get(cell, {})

    def of(self, *cell: object) -> list[float]:
        """The held-out loss at the end of each seed, in order."""
        return [math.inf if each.loss is None else each.loss for each in self.seeds(*cell).values()]

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

    def at_end(self, where: Cell, method: str, settings: str) -> bool:
        """Whether that rate is the lowest or the highest of several that were tried: a better one may lie beyond."""
        tried = [str(cell[5]).partition(" ")[::2] for cell in self._found if cell[:5] == (*where, method)]
        rates = sorted(float(rate.removeprefix("rate=")) for rate, rest in tried if rest == settings)
        return len(rates) > 1 and float(self.best(where, method, settings)[0]) in (rates[0], rates[-1])

    def at_best(self, where: Cell, method: str, settings: str) -> dict[int, Outcome]:
        """The outcome of each seed at that rate."""
        return self.seeds(*where, method, f"rate={self.best(where, method, settings)[0]} {settings}".strip())


def standard_error(losses: Sequence[float]) -> float:
    """Of the mean; 0 for one seed, NaN if a run diverged."""
    if not all(map(math.isfinite, losses)):
        return math.nan
    return stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


def text(losses: Sequence[float]) -> str:
    """The mean, and of several seeds their number."""
    if not losses:
        return ""
    if not all(map(math.isfinite, losses)):
        return "diverged"
    if len(losses) == 1:
        return f"{mean(losses):.3f}"
    return f"{mean(losses):.3f} ({len(losses)})"


def write_page(results: Mapping[Run, Outcome], folder: Path) -> Path:
    """Writes the page, and returns its path."""
    losses = Losses(results)
    places = sorted({(run.model, run.workers, run.rounds) for run in results}, key=lambda place: (place[0], place[2], place[1]))
    return filled(
        Path(__file__).with_name("page.txt"), folder / "finals.md",
        missing=_missing(results), main=_main(losses),
        apart=_apart(losses), real=_real(losses, places), number=_number(losses),
        rates=_rates(losses), memory=_memory(losses),
    )  # fmt: skip


def _missing(results: Mapping[Run, Outcome]) -> str:
    """How many runs of the plan have no result, by the question that they answer."""
    found = {question: sum(run not in results for run in plan.runs([question])) for question in plan.QUESTIONS}
    named = ", ".join(f"{question} {count}" for question, count in found.items() if count)
    return f" Runs of [the plan](../../../benchmarks/finals/plan.py) that are missing, by question: {named}." if named else ""


def _main(losses: Losses) -> str:
    """The table with every design that an expert would build."""
    rows = []
    for profile in KINDS:
        where, designs = (MAIN[0], profile, *MAIN[1:]), plan.designs(profile, MAIN[1])
        cells = [_of_this_server(losses, where, plan.BOTH), text(_without_the_slow(losses, where))]
        cells += [_best(losses, where, "rounds", designs[name]) if name in designs else "" for name in _DESIGNS[:-1]]
        cells.append(_experts(losses, where, "rounds", only=plan.BACKUP))
        rows.append([profile, *cells, _best(losses, where, "rounds", plan.team(profile, plan.SHORTER))])
    return table(["Cluster", "this server", "this server, fast alone", *_DESIGNS, "best, shorter memory"], rows)


def interval(found: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of two or more, by Student's t."""
    return float(student.ppf(0.975, len(found) - 1)) * standard_error(found)


def told(found: Sequence[float]) -> str:
    """The mean, and its interval; empty if there are less than three."""
    return f"{mean(found):+.3f} ± {interval(found):.3f}" if len(found) > 2 else ""


def verdict(found: Sequence[float]) -> str:
    """Of `differences`: lower or higher, if 0 is outside of the interval; else level."""
    middle = mean(found)
    return "level" if abs(middle) <= interval(found) else "lower" if middle < 0 else "higher"


def difference(losses: Losses, where: Cell, more: str = "", kind: str = "") -> str:
    """The mean of `differences`, and its 95 % interval; empty if there are less than three."""
    return told(differences(losses, where, more, kind))


def differences(losses: Losses, where: Cell, more: str = "", kind: str = "", memory: str = "") -> list[float]:
    """This server less the best rival, under each of the seeds that both have; `kind` is "real " for real processes, `memory`
    the rival's."""
    return _paired(_ours(losses, where, more, kind), _best_rival(losses, where, f"{memory} {more}".strip(), kind))


def against(losses: Losses, profile: str, memory: str = plan.SHORTER, own: str = "") -> list[float]:
    """This server less the best form of DDP, in the place of most runs, each with a memory of its own, under each of the seeds
    that both have."""
    where = (MAIN[0], profile, *MAIN[1:])
    theirs = losses.at_best(where, "rounds", plan.team(profile, memory))
    return _paired(losses.seeds(*where, "ours", f"{plan.ours(plan.BOTH)} {own}".strip()), theirs)


def headline(losses: Losses) -> str:
    """The first table of docs/method.md: this server, the best form of DDP, and that with a shorter memory."""
    rows = []
    for profile, kind in KINDS.items():
        where = (MAIN[0], profile, *MAIN[1:])
        loss, _, name = best_form(losses, where)
        shorter = losses.best(where, "rounds", plan.team(profile, plan.SHORTER))[1]
        ours = mean(losses.of(*where, "ours", plan.ours(plan.BOTH)))
        rows.append(
            [
                f"`{profile}`: {kind.about}", f"{ours:.3f}", f"{loss:.3f}, {_short(name)}", difference(losses, where),
                f"{mean(shorter):.3f}", told(against(losses, profile)),
            ]
        )  # fmt: skip
    return table(["Cluster", "this server", "best form of DDP", "difference", "shorter memory", "difference"], rows)


def lost_at_one_rate(losses: Losses, rate: str) -> list[float]:
    """By how much each kind's best form of DDP with a shorter memory is higher at this rate than at its best one, in the mean
    of the seeds that have both."""
    found = []
    for profile in KINDS:
        where, settings = (MAIN[0], profile, *MAIN[1:]), plan.team(profile, plan.SHORTER)
        made = losses.seeds(*where, "rounds", f"rate={rate} {settings}")
        found.append(mean(_paired(made, losses.at_best(where, "rounds", settings))))
    return found


def _memory(losses: Losses) -> str:
    """The loss by the memory of the moments, of rounds at the best of three rates, and of this server."""
    rows, (usual, *shorter) = [], plan.OUR_MEMORIES
    for profile, rounds in plan.MEMORY_AT:
        where = (MAIN[0], profile, MAIN[1], rounds)
        cells = [_best(losses, where, "rounds", plan.team(profile, memory)) for memory in ("", *plan.MEMORIES)]
        cells += [
            text(losses.of(*where, "ours", f"{plan.ours(plan.BOTH)} {memory}".strip())) for memory in (usual, "", *shorter)
        ]
        rows.append([profile, f"{rounds:,}", *cells])
    heads = [f"{who}, {share}" for who, shares in _SHARES.items() for share in shares]
    return table(["Cluster", "Rounds", *heads], rows)


def _best_rival(losses: Losses, where: Cell, more: str, kind: str) -> dict[int, Outcome]:
    """The outcome of each seed of the form of DDP with the lowest mean loss, at its best rate; empty if none was tried."""
    _, settings, _ = best_form(losses, where, more, kind)
    return losses.seeds(*where, f"{kind}rounds", settings) if settings else {}


def best_form(losses: Losses, where: Cell, more: str = "", kind: str = "") -> tuple[float, str, str]:
    """Of the forms of DDP that were tried there, the one with the lowest mean loss: that loss, its settings with the best rate,
    and its name; infinity and empty if there is none."""
    made = [(math.inf, "", "")]
    for name, design in plan.designs(str(where[1]), int(str(where[2]))).items():
        settings = f"{design} {more}".strip()
        rate, found = losses.best(where, f"{kind}rounds", settings)
        if found:
            made.append((mean(found), f"rate={rate} {settings}".strip(), name))
    return min(made)


def _ours(losses: Losses, where: Cell, more: str, kind: str) -> dict[int, Outcome]:
    """This server's outcome of each seed."""
    return losses.seeds(*where, f"{kind}ours", _settings(losses, where, plan.BOTH, more, f"{kind}ours"))


def elsewhere(losses: Losses) -> str:
    """The table of docs/method.md: this server and the best form of DDP in other places. Bold: not level, by three seeds."""
    rows = []
    for name, (model, workers, rounds, more, kind, memory) in _ELSEWHERE.items():
        places = [(model, profile, workers, rounds) for profile in FOUR]
        cells = [_beside(losses, where, more, kind, memory) for where in places]
        seeds = {count for count, _ in cells if count}
        if seeds:
            rows.append([name, " to ".join(map(str, sorted({min(seeds), max(seeds)}))), *(cell for _, cell in cells)])
    return table(["", "seeds", *FOUR], rows)


def _beside(losses: Losses, where: Cell, more: str, kind: str, memory: str) -> tuple[int, str]:
    """How many seeds this server and the best form of DDP share, and the mean loss of each; 0 and empty if none. A star: DDP's
    best rate was the lowest or the highest that was tried."""
    besides = f"{memory} {more}".strip()
    settings = best_form(losses, where, besides, kind)[1]
    ours, theirs = _ours(losses, where, more, kind), losses.seeds(*where, f"{kind}rounds", settings)
    shared = [seed for seed in ours if seed in theirs]
    if not shared:
        return 0, ""
    apart = _paired(ours, theirs)
    bold = "**" * (len(apart) > 2 and verdict(apart) != "level")
    first, second = (mean(each[seed].loss or math.inf for seed in shared) for each in (ours, theirs))
    star = "\\*" * (not kind and losses.at_end(where, "rounds", settings.partition(" ")[2]))
    return len(shared), f"{bold}{first:.3f}, {second:.3f}{star}{bold}"


def _paired(made: Mapping[int, Outcome], others: Mapping[int, Outcome]) -> list[float]:
    """The loss of the one less that of the other, under each of the seeds that both have; without those that diverged."""
    both = [(one.loss, others[seed].loss) for seed, one in made.items() if seed in others]
    return [one - other for one, other in both if one is not None and other is not None]


def _settings(losses: Losses, where: Cell, settings: str, more: str, method: str = "ours") -> str:
    """Of this server: at one rate for all clusters, or at the best of several, as the rivals, if one has not been chosen."""
    if where[0] in plan.OTHER_RATES or more:
        whole = f"{settings} {more}".strip()
        return f"rate={losses.best(where, method, whole)[0]} {whole}".strip()
    return plan.ours(settings)


def _best(losses: Losses, where: Cell, method: str, settings: str) -> str:
    return text(losses.best(where, method, settings)[1])


def _short(name: str) -> str:
    """What a design is called beside its loss."""
    return _SHORT.get(name, name.removeprefix(f"{plan.BACKUP}, "))


def _experts(losses: Losses, where: Cell, method: str, only: str = "") -> str:
    """The lowest loss of what an expert would build instead of DDP on all workers, with its name; empty if there is none. With
    `only`, of the designs whose names begin so."""
    tried = []
    for name, design in plan.designs(str(where[1]), int(str(where[2]))).items():
        found = losses.best(where, method, design)[1] if name != plan.ALL and name.startswith(only) else []
        if found:
            tried.append((mean(found), f"{text(found)} {_short(name)}"))
    return min(tried)[1] if tried else ""


def _apart(losses: Losses) -> str:
    """Others that do not wait in each step, at their best rates, beside this server."""
    rows = []
    for profile in plan.THREE:
        where = (MAIN[0], profile, *MAIN[1:])
        cells = [_best(losses, where, method, settings) for method, settings in plan.APART.values()]
        if any(cells):
            ours = [_of_this_server(losses, where, settings) for settings in (plan.BOTH, plan.GROWTH)]
            rows.append([profile, *ours, *cells])
    return table(["Cluster", "this server", "its rule alone", *plan.APART], rows)


def _real(losses: Losses, places: Iterable[tuple[str, int, int]]) -> str:
    """The table of real processes."""
    rows: list[list[str]] = []
    for model, workers, rounds in places:
        name = f"{model}, {workers}"
        for profile in KINDS:
            where = (model, profile, workers, rounds)
            if losses.best(where, "real ours", plan.BOTH)[0]:
                cells = [_best(losses, where, *each) for each in (("real ours", plan.BOTH), ("real rounds", ""))]
                cells.append(_experts(losses, where, "real rounds"))
                rows.append([name, profile, *cells, difference(losses, where, kind="real ")])
                name = ""
    heads = ["Model, workers", "Cluster", "this server", "DDP, all", "an expert's best", "difference"]
    return table(heads, rows)


def _of_this_server(losses: Losses, where: Cell, settings: str) -> str:
    """Its loss at the end."""
    return text(losses.of(*where, "ours", plan.ours(settings)))


def _without_the_slow(losses: Losses, where: Cell) -> list[float]:
    """Of this server in step, on the fast workers alone; empty if that was not run."""
    model, profile, workers, rounds = where
    if (model, workers, rounds) != MAIN or profile not in plan.WITHOUT:
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
            seeds = found[workers, rounds][1]
            sooner = f", {_as_long(alone, mean(seeds)) / rounds:.1f} ×" if seeds and workers > 1 and alone else ""
            cells.append(text(seeds) + sooner)
        rows.append([workers, *cells])
    return table(["Workers", *(f"{each:,} batches each" for each in plan.LENGTHS)], rows)


def _rates(losses: Losses) -> str:
    """The best rate of one worker alone, and those of 8 workers, on other models."""
    rows = []
    for model, tried in plan.ONE_WORKERS_RATES.items():
        clusters = [(model, "equal", 1, 200), *((model, profile, 8, 200) for profile in plan.THREE)]
        rows.append([model, ", ".join(map(str, tried)), *(losses.best(where, "ours", plan.BOTH)[0] for where in clusters)])
    return table(["Model", "one worker tried", "best for one", *(f"8, {profile}" for profile in plan.THREE)], rows)


def _as_long(alone: Mapping[int, float], loss: float) -> float:
    """The batches after which one worker is as good."""
    batches = sorted(alone, reverse=True)  # from the lowest loss on, as `interp` wants them
    return float(np.exp(np.interp(loss, [alone[each] for each in batches], np.log(batches))))


def ablations(losses: Losses) -> str:
    """The table of docs/method.md: what each part is worth, at this server's rate and at the best of those that were tried."""
    rows = []
    for settings, name in plan.NAMES.items():
        rows.append([name, *(told(costs(losses, profile, plan.ours(settings))) for profile in FOUR)])
        if settings in (plan.UNBOUND, plan.NO_LOOK):
            rows.append([f"{name}, best rate", *(told(costs_at_best(losses, profile, settings)) for profile in FOUR)])
    return table(["", *FOUR], rows)


def costs(losses: Losses, profile: str, settings: str) -> list[float]:
    """By how much this server's loss is higher with other settings, under each seed."""
    where = (MAIN[0], profile, *MAIN[1:], "ours")
    return _paired(losses.seeds(*where, settings), losses.seeds(*where, plan.ours(plan.BOTH)))


def costs_at_best(losses: Losses, profile: str, settings: str) -> list[float]:
    """The same with these settings at the best of the rates that were tried for them."""
    where = (MAIN[0], profile, *MAIN[1:])
    return _paired(losses.at_best(where, "ours", settings), losses.seeds(*where, "ours", plan.ours(plan.BOTH)))
