"""The results page, in Markdown: which optimizer under how many workers, with what is still missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.page import count, table
from benchmarks.models import plan
from benchmarks.models.analysis import Case, Summary, by_kappa, difference, measured
from benchmarks.models.plan import STEPS, Results
from benchmarks.models.runs import METHODS, WARMUP_STEPS
from benchmarks.paper.statistics import spread

REMARKS = "remarks.md"  # written by hand, beside the page: the verdict
_TEMPLATE = Path(__file__).with_name("page.txt")
_PICTURES = {"workers": "at the best rate over the number of workers", "rates": "over the learning rate"}
_WIDTHS = sorted(STEPS)
_COMPARED = (  # what energy matching changes, and what it is measured against
    ("gem-adamw", "downpour-adamw"), ("gem-own", "downpour-own"), ("gem-own", "adaptive-own"), ("gem-adamw", "gem-own"),
    ("gem-adamw", "gem-sgd"),
)  # fmt: skip

_NO_VERDICT = """\
## Verdict

**To be written, in `remarks.md`, when the runs below are complete**: where energy matching wins, where it does not, by how
much, and which κ and defaults follow."""


def write(folder: Path, results: Results, conditions: Mapping[str, Any], plots: Iterable[str]) -> Path:
    """Writes README.md, from page.txt, for the plots that lie in the folder."""
    remarks = folder / REMARKS
    cells = {(name, n): measured(plan.case(name, n), results) for name in METHODS for n in _WIDTHS}
    parts: dict[str, Any] = {
        "batch": plan.case(plan.SHARED, 1).batch_size, "chance": math.log(96), "warmup": WARMUP_STEPS,
        "verdict": remarks.read_text(encoding="utf-8").strip() if remarks.exists() else _NO_VERDICT,
        "progress": _progress(results), "seeds": len(plan.SEEDS),
        "losses": _losses(cells) + _picture("workers", plots) + _picture("rates", plots),
        "differences": _differences(cells), "alone": _alone(cells, results), "kappas": _kappas(results),
        "mnist": _mnist(results), "mnist_workers": plan.MNIST_WORKERS, "mnist_steps": plan.MNIST_STEPS,
        "mnist_batch": plan.MNIST_BATCH, "machine": _machine(conditions), "staleness": _staleness(cells), "seed": plan.SEEDS[0],
    }  # fmt: skip
    page = folder / "README.md"
    page.write_text(_TEMPLATE.read_text(encoding="utf-8").format(**parts), encoding="utf-8")
    return page


def _picture(name: str, plots: Iterable[str]) -> str:
    """The plot, after a table; nothing if it is not there."""
    return f"\n\n![Loss {_PICTURES[name]}]({name}.png)" if name in plots else ""


def _progress(results: Results) -> str:
    """How many runs are done and missing, by stage."""
    done = {name: [results(run) is not None for run in plan.STAGES[name](results)] for name in plan.STAGES}
    missing = [f"{name} {each.count(False)} of {len(each)}" for name, each in done.items() if each and not all(each)]
    unknown = [name for name, each in done.items() if not each]
    runs = {run for name in plan.STAGES for run in plan.STAGES[name](results) if results(run) is not None}
    if not missing and not unknown:
        return f"{len(runs)} runs; nothing is missing."
    text = f"**{len(runs)} runs so far. Missing**: " + ", ".join(missing)
    if unknown:
        text += f"{'; ' if missing else ''}not begun, because the best rates are not known yet: {', '.join(unknown)}"
    return text + "."


def _losses(cells: Mapping[tuple[str, int], Case]) -> str:
    heads = ["Method", *(f"{count(n)}, {STEPS[n]} steps each" for n in _WIDTHS)]
    rows = ([method.label, *(_cell(cells[name, n]) for n in _WIDTHS)] for name, method in METHODS.items())
    end = "\n\n* The best rate is the lowest or the highest that was tried."
    return table(heads, rows) + (end if any(each.at_the_end for each in cells.values()) else "")


def _cell(each: Case) -> str:
    if not each.tried:
        return "not run"
    if each.tried < each.planned:
        return f"{_number(each.so_far)} so far, {each.tried} of {each.planned} rates"
    if each.best is None:
        return "diverged at every rate"
    return f"{_text(each.summary)}, {each.best.rate:g}{' *' if each.at_the_end else ''}"


def _text(summary: Summary) -> str:
    """Mean and range, and what is missing or went wrong."""
    if not summary.outcomes:
        return "not run"
    notes = [f"{summary.diverged} of {len(summary.outcomes)} diverged"] if summary.diverged else []
    notes += [count(len(summary.outcomes), "seed")] if not summary.complete else []
    return ", ".join([summary.loss.text() if summary.loss.count else "diverged", *notes])


def _differences(cells: Mapping[tuple[str, int], Case]) -> str:
    rows = []
    for first, second in _COMPARED:
        found = [difference(cells[first, n].summary, cells[second, n].summary) for n in _WIDTHS]
        rows.append([METHODS[first].label, METHODS[second].label, *map(_difference, found)])
    return table(["First", "Second", *map(count, _WIDTHS)], rows)


def _difference(found: tuple[float, bool] | None) -> str:
    if found is None:
        return "–"
    value, apart = found
    if not math.isfinite(value):
        return "both diverged" if math.isnan(value) else "first diverged" if value > 0 else "second diverged"
    return f"**{value:+.3f}**" if apart else f"{value:+.3f}"


def _alone(cells: Mapping[tuple[str, int], Case], results: Results) -> str:
    rows: list[list[object]] = []
    for n in _WIDTHS:
        if n == 1:
            continue
        steps, samples = (measured(plan.case(plan.SHARED, 1, length), results) for length in (STEPS[n], n * STEPS[n]))
        known = [each for name in METHODS if (each := cells[name, n]).summary.loss.count]
        first = min(known, key=lambda each: each.summary.loss.mean, default=None)
        complete = all(cells[name, n].summary.complete or cells[name, n].best is None for name in METHODS)
        label = METHODS[first.case.method].label + ("" if complete else ", so far") if first else "–"
        rows.append([n, _cell(steps), _cell(first) if first else "not run", _cell(samples), label])
    heads = ["n", "AdamW alone, as many steps", "n workers, the best method", "AdamW alone, as many samples", "Best method"]
    return table(heads, rows)


def _kappas(results: Results) -> str:
    rows = []
    cases = [each for each in plan.matched_cases() if each.method in plan.ON_SERVER]
    for each in sorted(cases, key=lambda run: (plan.MATCHED.index(run.method), run.workers)):
        found = by_kappa(each, results)
        texts = [_text(found[kappa]) if kappa in found else "not run" for kappa in plan.KAPPAS]
        rows.append([METHODS[each.method].label, each.workers, *texts])
    heads = ["Method", "Workers", *(f"κ = {kappa:g}" for kappa in plan.KAPPAS)]
    return table(heads, rows)


def _mnist(results: Results) -> str:
    rows = []
    for name in plan.ON_SERVER:
        each = measured(plan.mnist_case(name), results)
        accuracy = spread(outcome.accuracy for outcome in each.summary.outcomes)
        rows.append([METHODS[name].label, f"{accuracy.text('{:.2f}', 100)} %", _cell(each)])
    return table(["Method", "Test accuracy", "Test loss, rate"], rows)


def _machine(conditions: Mapping[str, Any]) -> str:
    if not conditions:
        return "not run yet."
    return (
        f"{conditions['processor']}, {conditions['cores']} cores, {conditions['memory_bytes'] / 2**30:.0f} GiB, "
        f"{conditions['system']}; Python {conditions['python']}, PyTorch {conditions['torch']}. "
        "The machine did other work at the same time."
    )


def _staleness(cells: Mapping[tuple[str, int], Case]) -> str:
    """Its mean by number of workers."""
    of = {
        n: spread(outcome.staleness for (_, width), each in cells.items() if width == n for outcome in each.summary.outcomes)
        for n in _WIDTHS
    }
    return ", ".join(f"{each.mean:.1f} with {count(n)}" for n, each in of.items() if each.count) or "not measured yet"


def _number(loss: float) -> str:
    return "diverged" if math.isinf(loss) else f"{loss:.3f}"
