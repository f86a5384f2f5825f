"""The results page, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.page import count, table
from benchmarks.versus import figure
from benchmarks.versus.analysis import Cell, base_of, cell, one_workers, ratio, tuned
from benchmarks.versus.contenders import contenders
from benchmarks.versus.contenders.ours import VARIANTS
from benchmarks.versus.models import GOALS
from benchmarks.versus.plan import ONE_WORKER, RATE_PROFILE, RATE_SEED, WIDTHS, Case, Choice, Results, best_rate, rates, wanted
from benchmarks.versus.profiles import PROFILES

_TEMPLATE = Path(__file__).with_name("page.txt")
_REMARKS = "remarks.md"  # written by hand, beside the page
_NO_VERDICT = "**To be written, in `remarks.md`, when the runs are complete.**"
Rate = Callable[[Case, Results], float | None]


def write(
    folder: Path, results: Results, head: Mapping[str, Any], choice: Choice, drawn: bool,
    overhead: Mapping[Case, float],
) -> Path:  # fmt: skip
    """Writes README.md, from page.txt.

    Args:
        folder: Where the figure lies.
        results: The runs so far.
        head: The unit, the limit and the conditions that the results name.
        choice: What is wanted: the page says what of it is missing.
        drawn: Whether the figure is there.
        overhead: Milliseconds of an exchange.
    """
    remarks, conditions = folder / _REMARKS, head["conditions"]
    parts = {
        "unit": head["unit"], "spot_unit": head["unit"] * PROFILES["spot"].unit, "limit": head["limit"], "rate_seed": RATE_SEED,
        "verdict": remarks.read_text(encoding="utf-8").strip() if remarks.exists() else _NO_VERDICT,
        "progress": _progress(results, choice),
        "figure": f"![Time to the lower loss by kind of cluster]({figure.NAME})" if drawn else "",
        "times": _times(results, tuned), "untuned": _times(results, one_workers), "samples": _samples(results),
        "one_worker": ", ".join(f"{rate:g} for {name}" for name, rate in ONE_WORKER.items()),
        "rates": _rates(results), "overhead": _overhead(overhead),
        "profiles": " ".join(f"`{each.name}`: {each.meaning}." for each in PROFILES.values()),
        "flags": " or ".join(f"`{' '.join(flags)}`" for flags in VARIANTS["gem"].flags.values()),
        "machine": f"{conditions['cores']} cores ({conditions['processor']})",
        **{name: " and ".join(f"{loss:g}" for loss in goal.losses) for name, goal in GOALS.items()},
    }  # fmt: skip
    page = folder / "README.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_TEMPLATE.read_text(encoding="utf-8").format(**parts), encoding="utf-8")
    return page


def _progress(results: Results, choice: Choice) -> str:
    runs = set(wanted(choice, results))
    missing = [run for run in runs if results(run) is None]
    if not missing:
        return f"{count(len(runs), 'run')}; nothing is missing."
    profiles = [name for name in PROFILES if any(run.profile == name for run in missing)]
    return (
        f"**{count(len(runs) - len(missing), 'run')} so far; {len(missing)} of those known to be wanted are missing**, "
        f"in {', '.join(profiles)}. A contender's further runs are known when its best rate is."
    )


def _cases() -> list[Case]:
    return [Case(name, model, width) for model in GOALS for width in sorted(WIDTHS) for name in contenders()]


def _times(results: Results, rate: Rate) -> str:
    rows = []
    for case in _cases():
        for profile in PROFILES:
            mine = cell(case, profile, rate(case, results), results)
            if mine is None:
                continue
            base = cell(base_of(case), profile, rate(base_of(case), results), results)
            texts = [text for which in (0, 1) for text in (_time(mine, which), _ratio(ratio(mine, base, which)))]
            rows.append([case.model, case.workers, profile, contenders()[case.contender].label, f"{mine.rate:g}", *texts])
    rows.sort(key=lambda row: (row[0] != next(iter(GOALS)), row[1], list(PROFILES).index(str(row[2]))))
    heads = ["Model", "Workers", "Cluster", "Contender", "Rate", "Higher loss", "Ratio to DDP", "Lower loss", "Ratio to DDP"]
    return table(heads, rows) if rows else "Not measured yet."


def _time(of: Cell, which: int) -> str:
    mean, times = of.mean(which), of.times(which)
    if mean is None:
        lowest = min((each.lowest for each in of.outcomes.values() if each.lowest is not None), default=None)
        return "diverged" if all(each.diverged for each in of.outcomes.values()) else f"not ({lowest:.3f})"
    return f"{mean:.0f} ({min(times):.0f}–{max(times):.0f})" if len(times) > 1 else f"{mean:.0f}"


def _ratio(found: float | None) -> str:
    return "–" if found is None else f"{found:.2f}"


def _samples(results: Results) -> str:
    rows = []
    for case in _cases():
        found = [cell(case, profile, tuned(case, results), results) for profile in PROFILES]
        if any(found):
            texts = ["–" if each is None or (mean := each.mean_samples(1)) is None else f"{mean / 1000:.1f}" for each in found]
            rows.append([case.model, case.workers, contenders()[case.contender].label, *texts])
    return table(["Model", "Workers", "Contender", *PROFILES], rows) if rows else "Not measured yet."


def _rates(results: Results) -> str:
    rows = []
    for case in _cases():
        best, texts = best_rate(case, results), []
        for rate in rates(case, results):
            found = results(case.run(RATE_PROFILE, rate, RATE_SEED))
            if found is not None:
                text = f"**{rate:g}**" if rate == best else f"{rate:g}"
                units, lowest = found.units[1], found.lowest
                end = "diverged" if found.diverged or lowest is None else f"({lowest:.3f})" if units is None else f"{units:.0f}"
                texts.append(f"{text}: {end}")
        if texts:
            rows.append([case.model, case.workers, contenders()[case.contender].label, ", ".join(texts)])
    return table(["Model", "Workers", "Contender", "Rates"], rows) if rows else "Not measured yet; a quick run has given rates."


def _overhead(found: Mapping[Case, float]) -> str:
    if not found:
        return "Not measured yet: `python -m benchmarks.versus --overhead`."
    rows = [
        [case.model, case.workers, contenders()[case.contender].label, f"{milliseconds:.1f}"]
        for case, milliseconds in found.items()
    ]
    return table(["Model", "Workers", "Contender", "ms"], rows)
