"""The page docs/results/versus/simulated.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.lib.page import table
from benchmarks.lib.results import write
from benchmarks.versus.profiles import KINDS
from benchmarks.versus.simulated import plan
from benchmarks.versus.simulated.runs import Outcome, Run

_FORMS = {"before": "Before, 0.003", "leased": "n = leases, 0.003", "ahead": "Look-ahead, 0.003"}

Results = Mapping[Run, Outcome]
Cell = tuple[object, ...]  # model, profile, workers, method, settings


class Times:
    """The times to a model's second loss, by what was run, each with its seeds."""

    def __init__(self, results: Results) -> None:
        self._outcomes: dict[Cell, list[Outcome]] = {}
        for run, outcome in sorted(results.items(), key=lambda item: item[0].seed):
            cell = (run.model, run.profile, run.workers, run.method, run.settings)
            self._outcomes.setdefault(cell, []).append(outcome)

    def seconds(self, *cell: object) -> list[float | None]:
        """Of each seed; None: not reached."""
        return [outcome.second for outcome in self._outcomes.get(cell, [])]

    def mean(self, *cell: object) -> float | None:
        """Over the seeds; None if one did not reach the loss, or there are no runs."""
        times = self.seconds(*cell)
        reached = [time for time in times if time is not None]
        return mean(reached) if reached and len(reached) == len(times) else None

    def best(self, model: str, profile: str, workers: int, method: str, settings: Iterable[str]) -> tuple[str, float] | None:
        """The settings with the lowest mean time."""
        times = {each: self.mean(model, profile, workers, method, each) for each in settings}
        reached = {each: time for each, time in times.items() if time is not None}
        return min(reached.items(), key=lambda item: item[1]) if reached else None

    def text(self, *cell: object, brief: bool = False) -> str:
        """The mean, then the lowest and the highest; how many seeds reached the loss, or how low they came, if not all did.

        Args:
            cell: What was run.
            brief: Only the mean.
        """
        outcomes = self._outcomes.get(cell, [])
        if not outcomes:
            return ""
        reached = [one.second for one in outcomes if one.second is not None]
        if not reached:
            return f"– ({_range([one.lowest for one in outcomes], '.2f')})"
        if len(reached) < len(outcomes):
            return f"{len(reached)} of {len(outcomes)}: {_range(reached)}"
        return f"**{mean(reached):.0f}**" + ("" if brief else f" ({_range(reached)})")


def write_page(results: Results, folder: Path) -> Path:
    """Writes the page, as far as there are runs for it. Returns its path."""
    times = Times(results)
    body = (Path(__file__).parent / "page.txt").read_text(encoding="utf-8")
    parts = {
        "equal": _equal(times),
        "kinds": _kinds(times),
        "rates": _by_rate(times, 16, (0.001, 0.0015, plan.RATE, 0.006, 0.009)),
        "few": _few(times),
        "parts": _changes(times, plan.PARTS),
        "choices": _changes(times, plan.CHOICES, means=True),
        "cases": _changes(times, plan.CASES, ("equal", "exponential"), means=True),
        "rivals": _dana(times),
        "own": _own(times),
        "alone": _by_rate(times, 1, plan.ALONE),
        "convnet": _convnet(times),
        "missing": str(sum(run not in results for run in plan.runs(plan.QUESTIONS))),
    }
    write(folder / "simulated.md", body.format(**parts))
    return folder / "simulated.md"


def _ahead(setting: str = "") -> str:
    return f"rate={plan.RATE} {setting}".strip()


def _range(values: Sequence[float], form: str = ".0f") -> str:
    return "–".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs is not None else ""


def _equal(times: Times) -> str:
    rows = []
    for count in (*plan.COUNTS, *plan.MANY):
        ours = ("transformer", "equal", count, "ahead", _ahead())
        rates = {run.settings for run in plan.runs(["equal", "many"]) if run.method == "rounds"}
        best = times.best("transformer", "equal", count, "rounds", sorted(rates))
        theirs = ("transformer", "equal", count, "rounds", best[0]) if best else None
        rounds = (times.text(*theirs), best[0].removeprefix("rate=")) if theirs and best else ("", "")
        rows.append((count, *rounds, times.text(*ours), _ratio(times.mean(*ours), best[1] if best else None)))
    return table(["Workers", "Rounds", "at their best rate", "Look-ahead, 0.003", "Ratio"], rows)


def _kinds(times: Times) -> str:
    rows = []
    for kind in ("equal", *plan.KINDS):
        cells = [
            ("transformer", kind, 16, method, f"rate={rate}")
            for method, rate in (("rounds", plan.ROUNDS_RATE), *((each, plan.RATE) for each in _FORMS))
        ]
        ratio = _ratio(times.mean(*cells[3]), times.mean(*cells[0]))
        rows.append((kind, *(times.text(*cell) for cell in cells), ratio))
    return table(["Kind", "Rounds, 0.01", *_FORMS.values(), "Ratio to rounds"], rows)


def _by_rate(times: Times, workers: int, rates: Sequence[float]) -> str:
    return table(
        ["Rate", *map(str, rates)],
        [("time to 2.3", *(times.text("transformer", "equal", workers, "ahead", f"rate={rate}") for rate in rates))],
    )


def _few(times: Times) -> str:
    rows = [
        (f"{kind}: {KINDS[kind].meaning}", *(times.text("transformer", kind, 16, each, _ahead()) for each in _FORMS))
        for kind in plan.FEW
    ]
    return table(["Kind", *_FORMS.values()], rows)


def _changes(times: Times, changes: Mapping[str, str], profiles: Sequence[str] = plan.ABLATED, means: bool = False) -> str:
    named = {"all parts": "", **changes}
    rows = [
        (name, *(times.text("transformer", profile, 16, "ahead", _ahead(setting), brief=means) for profile in profiles))
        for name, setting in named.items()
    ]
    return table(["", *profiles], rows)


def _dana(times: Times) -> str:
    rates = dict.fromkeys(run.settings.split()[0] for run in plan.QUESTIONS["rivals"])
    rows = [
        (name, *(times.text("transformer", "equal", 16, "dana", f"{rate} {gap}".strip()) for rate in rates))
        for name, gap in {"": "", "`gap`": "gap=True"}.items()
    ]
    return table(["", *rates], rows)


def _own(times: Times) -> str:
    places = [(profile, count) for count in (4, 16) for profile in plan.ABLATED]
    rows = [
        (name, *(times.text("transformer", *place, "own", _ahead(setting)) for place in places))
        for name, setting in plan.OWN.items()
    ]
    return table(["", *(f"{profile}, {count}" for profile, count in places)], rows)


def _convnet(times: Times) -> str:
    asked = dict.fromkeys((run.method, run.settings) for run in plan.QUESTIONS["convnet"])
    places = [("equal", 4), *((profile, 16) for profile in plan.ABLATED)]
    rows = [
        (method, f"`{settings}`", *(times.text("convnet", *place, method, settings) for place in places))
        for method, settings in asked
    ]
    return table(["Method", "Settings", *(f"{profile}, {count}" for profile, count in places)], rows)
