"""The results page, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib.page import count, table
from benchmarks.versus import figure, plan
from benchmarks.versus.analysis import Cell, base_of, cell, fast_alone, ratio, tuned
from benchmarks.versus.contenders import contenders
from benchmarks.versus.contenders.ours import FLAGS
from benchmarks.versus.models import GOALS
from benchmarks.versus.plan import BASE, ONE_WORKER, RATE_PROFILE, RATE_SEED, WIDTHS, Case, Choice, Results
from benchmarks.versus.profiles import PROFILES

_TEMPLATE = Path(__file__).with_name("page.txt")
_REMARKS = "remarks.md"  # written by hand, beside the page
_NO_VERDICT = "**To be written, in `remarks.md`, when the runs are complete.**"
_FIRST = next(iter(GOALS))
_MAIN = (BASE, "torchft", "gem")  # in the table of all clusters
_OTHERS_IN = [name for name, each in PROFILES.items() if each.unit == 1]  # the clusters in which all contenders are


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
        "ratios": _ratios(results), "alone": _alone(results), "times": _times(results), "samples": _samples(results),
        "others": _others(results), "others_width": WIDTHS[0],
        "one_worker": ONE_WORKER["adamw"],
        "rates": _rates(results), "overhead": _overhead(overhead),
        "profiles": " ".join(f"`{each.name}`: {each.meaning}." for each in PROFILES.values()),
        "flags": " or ".join(f"`{' '.join(flags)}`" for flags in FLAGS.values()),
        "machine": f"{conditions['cores']} cores ({conditions['processor']})",
        **{name: " and ".join(f"{loss:g}" for loss in goal.losses) for name, goal in GOALS.items()},
    }  # fmt: skip
    page = folder / "README.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_TEMPLATE.read_text(encoding="utf-8").format(**parts), encoding="utf-8")
    return page


def _progress(results: Results, choice: Choice) -> str:
    runs = set(plan.wanted(choice, results))
    missing = [run for run in runs if results(run) is None]
    if not missing:
        return f"{count(len(runs), 'run')}; nothing is missing."
    profiles = [name for name in PROFILES if any(run.profile == name for run in missing)]
    return (
        f"**{len(runs) - len(missing)} of the {count(len(runs), 'run')} known to be wanted; {len(missing)} are missing**, "
        f"in {', '.join(profiles)}. A contender's further runs are known when its best rate is."
    )


def _cases() -> list[Case]:
    return [Case(name, model, width) for model in GOALS for width in sorted(WIDTHS) for name in contenders()]


def _times(results: Results) -> str:
    """DDP and this server in each cluster. Left out is a model and number of workers with which DDP's best rate fails."""
    rows = []
    for case, profile in product(_cases(), PROFILES):
        equal, base = (cell(base_of(case), kind, tuned(base_of(case), results), results) for kind in (RATE_PROFILE, profile))
        failed = equal is not None and equal.mean(0) is None
        mine = cell(case, profile, tuned(case, results), results)
        if mine is not None and case.contender in _MAIN and not failed:
            texts = [text for which in (0, 1) for text in (_time(mine, which), _ratio(ratio(mine, base, which)))]
            rows.append([case.model, case.workers, profile, contenders()[case.contender].label, f"{mine.rate:g}", *texts])
    rows.sort(key=lambda row: (row[0] != _FIRST, row[1], list(PROFILES).index(str(row[2]))))
    heads = ["Model", "Workers", "Cluster", "Contender", "Rate", "Higher loss", "Ratio to DDP", "Lower loss", "Ratio to DDP"]
    return table(heads, rows) if rows else "Not measured yet."


def _ratios(results: Results) -> str:
    """By kind of cluster, the lowest and the highest ratio to DDP's time over the numbers of workers: the transformer."""
    rows = []
    for profile in PROFILES:
        both = []
        for which in (0, 1):
            cases = [Case("gem", _FIRST, width) for width in sorted(WIDTHS)]
            pairs = [[cell(one, profile, tuned(one, results), results) for one in (case, base_of(case))] for case in cases]
            found = [each for mine, base in pairs if (each := ratio(mine, base, which)) is not None]
            both.append(f"{min(found):.2f} to {max(found):.2f}" if len(found) > 1 else f"{found[0]:.2f}" if found else "–")
        rows.append([profile, *both])
    return table(["Cluster", *(f"to the loss {loss:g}" for loss in GOALS[_FIRST].losses)], rows)


def _alone(results: Results) -> str:
    """The time to the transformer's lower loss of all workers, and of the fast ones alone."""
    rows = []
    for profile, width in product(("mixed", "straggler"), sorted(WIDTHS)):
        cases = [Case(name, _FIRST, width) for name in ("gem", BASE)]
        every = [cell(case, profile, tuned(case, results), results) for case in cases]
        alone = [fast_alone(case, profile, results) for case in cases]
        if all((*every, *alone)):
            fast = f"{width // 2} fast" if profile == "mixed" else f"{width} fast (one more)"
            rows.append([profile, width, fast, *("–" if each is None else _time(each, 1) for each in (*every, *alone))])
    labels = [contenders()[name].label for name in ("gem", BASE)]
    heads = [f"{label}, {who}" for who in ("all", "the fast alone") for label in labels]
    return table(["Cluster", "Workers", "Alone", *heads], rows) if rows else "Not measured yet."


def _time(of: Cell, which: int) -> str:
    mean, times = of.mean(which), of.times(which)
    if mean is None:
        if times:
            return f"{len(times)} of {len(of.outcomes)}: {sum(times) / len(times):.0f}"
        lowest = min((each.lowest for each in of.outcomes.values() if each.lowest is not None), default=None)
        return "diverged" if all(each.diverged for each in of.outcomes.values()) else f"not ({lowest:.3f})"
    return f"{mean:.0f} ({min(times):.0f}–{max(times):.0f})" if len(times) > 1 else f"{mean:.0f}"


def _ratio(found: float | None) -> str:
    return "–" if found is None else f"{found:.2f}"


def _others(results: Results) -> str:
    """Every contender's time to the transformer's lower loss, with the number of workers that all have; DDP untuned, too."""
    cases = {name: Case(name, _FIRST, WIDTHS[0]) for name in contenders()}
    named = [(case, contenders()[name].label, tuned(case, results)) for name, case in cases.items()]
    untuned = ONE_WORKER[cases[BASE].optimizer]
    named.insert(1, (cases[BASE], f"{contenders()[BASE].label} at {untuned:g}", untuned))
    rows = []
    for case, label, rate in named:
        found = [cell(case, profile, rate, results) for profile in _OTHERS_IN]
        if any(found):
            rows.append([label, *("–" if each is None else _time(each, 1) for each in found)])
    return table(["Contender", *_OTHERS_IN], rows) if rows else "Not measured yet."


def _samples(results: Results) -> str:
    """The lowest and the highest ratio to DDP's samples for the transformer, by contender."""
    found: dict[str, list[float]] = {}
    for case, profile in product(_cases(), PROFILES):
        mine, base = (cell(one, profile, tuned(one, results), results) for one in (case, base_of(case)))
        if case.model == _FIRST and case.contender != BASE and mine is not None and base is not None:
            used, theirs = mine.mean_samples(1), base.mean_samples(1)
            if used is not None and theirs is not None:
                found.setdefault(contenders()[case.contender].label, []).append(used / theirs)
    return "; ".join(f"{name}: {min(of):.2f} to {max(of):.2f}" for name, of in found.items()) or "not measured yet"


def _rates(results: Results) -> str:
    rows = []
    for case in _cases():
        best, texts = plan.best_rate(case, results), []
        for rate in plan.rates(case, results):
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
    rows = []
    for model, name in dict.fromkeys((case.model, case.contender) for case in found):
        times = (found.get(Case(name, model, width)) for width in sorted(WIDTHS))
        rows.append([model, contenders()[name].label, *("–" if time is None else f"{time:.1f}" for time in times)])
    return table(["Model", "Contender", *map(count, sorted(WIDTHS))], rows)
