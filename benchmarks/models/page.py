"""The results page, in Markdown: which optimizer under how many workers, with what is still missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.page import count, table
from benchmarks.models.analysis import Case, Summary, by_kappa, difference, measured
from benchmarks.models.plan import (
    KAPPAS,
    MATCHED,
    MNIST_BATCH,
    MNIST_STEPS,
    MNIST_WORKERS,
    ON_SERVER,
    SEEDS,
    SHARED,
    STAGES,
    STEPS,
    Results,
    case,
    matched_cases,
    mnist_case,
)
from benchmarks.models.runs import METHODS, WARMUP_STEPS
from benchmarks.paper.statistics import spread

REMARKS = "remarks.md"  # written by hand, beside the page: the verdict
_WIDTHS = sorted(STEPS)
_COMPARED = (  # what energy matching changes, and what it is measured against
    ("gem-adamw", "downpour-adamw"), ("gem-own", "downpour-own"), ("gem-own", "adaptive-own"), ("gem-adamw", "gem-own"),
    ("gem-adamw", "diloco-8"), ("gem-adamw", "diloco-32"), ("gem-adamw", "gem-sgd"),
)  # fmt: skip

_QUESTION = """\
A user has an optimizer and a learning rate that train a model on one machine. What should many asynchronous workers do with
them? The methods:

| Method | Flags of `gem-train` |
|---|---|
{methods}

GEM means energy matching: during one round of a worker, all workers together may move each parameter by at most κ steps of the
optimizer ([equations](../../rules.md#optimizers)). The model is the
[character transformer](../../../examples/character_transformer/README.md) with 1,090,848 parameters, on the source of Python's
standard library. A gradient is the mean over {batch} windows of 32 characters. Lower losses are better; guessing has
ln 96 = {chance:.2f}. Each worker's learning rate rises over {warmup} steps and is constant then."""

_CONDITIONS = """\
## Conditions, and what this does not show

- {machine}
- Every run is a real server and real workers over gRPC (`gem-train`), all workers as threads of one process. So asynchrony is
  real, but few gradients are computed at the same moment, and workers are about equally fast. Mean staleness: {staleness}.
- The workers took turns first come, first served, which is nearly [lockstep](../many-workers/README.md). Since then turns are
  random.
- One model, one text, short runs: {steps}. Longer training may rank the methods otherwise.
- Weight decay is AdamW's default, 0.01. Nothing but the learning rate and κ was tuned: the paper's GEM has momentum 0.9; DiLoCo
  has outer rate 0.7, outer momentum 0.9 and a delay of n. A run has {fewest} to {most} windows of 32 steps, far fewer than
  DiLoCo is made for.
- The best learning rate is chosen with seed {seed}, on the held-out text itself, among rates about 3 apart. So small
  differences mean little.
- The text depends on the version of Python, so losses compare only under the same version."""

_REPEAT = """\
## How to repeat it

```
.venv/bin/python -m benchmarks.models --mnist DIR          # everything that is missing, most valuable first; hours
.venv/bin/python -m benchmarks.models rates-16 seeds-16    # some stages
.venv/bin/python -m benchmarks.models --draw-only          # runs nothing: plots and page from the existing results
```

`results.json` has every run; those in it are not repeated. To continue after an interruption, give the same command again. To
measure all runs again, give another `--out`. The page includes `remarks.md` if it exists."""


def write(folder: Path, results: Results, conditions: Mapping[str, Any], plots: Iterable[str]) -> Path:
    """Writes README.md for the plots that lie in the folder."""
    remarks = folder / REMARKS
    verdict = remarks.read_text(encoding="utf-8").strip() if remarks.exists() else _no_verdict()
    cells = {(name, n): measured(case(name, n), results) for name in METHODS for n in _WIDTHS}
    parts = ["# Optimizers under many workers", _question(), verdict, _progress(results), _losses(cells)]
    parts += ["![Loss at the best rate over the number of workers](workers.png)"] if "workers" in plots else []
    parts += [_differences(cells), _alone(cells, results), _rates(cells)]
    parts += ["![Loss over the learning rate](rates.png)"] if "rates" in plots else []
    parts += [_kappas(results), _mnist(results), _REPEAT, _conditions(cells, conditions)]
    page = folder / "README.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _question() -> str:
    rows = []
    for method in METHODS.values():
        flags = [f"--rule {method.rule}", f"--optimizer {method.optimizer}"]
        flags += [f"--local-steps {method.local_steps}"] if method.local_steps > 1 else []
        rows.append(f"| {method.label} | `{' '.join(flags)}` |")
    return _QUESTION.format(methods="\n".join(rows), batch=case(SHARED, 1).batch_size, chance=math.log(96), warmup=WARMUP_STEPS)


def _no_verdict() -> str:
    return (
        "## Verdict\n\n**To be written, in `remarks.md`, when the runs below are complete**: where energy matching wins, where "
        "it does not, by how much, and which κ and defaults follow."
    )


def _progress(results: Results) -> str:
    """How many runs are done and missing, by stage."""
    done = {name: [results(run) is not None for run in STAGES[name](results)] for name in STAGES}
    missing = [f"{name} {each.count(False)} of {len(each)}" for name, each in done.items() if each and not all(each)]
    unknown = [name for name, each in done.items() if not each]
    runs = {run for name in STAGES for run in STAGES[name](results) if results(run) is not None}
    if not missing and not unknown:
        return f"{len(runs)} runs; nothing is missing."
    text = f"**{len(runs)} runs so far. Missing**: " + ", ".join(missing)
    if unknown:
        text += f"{'; ' if missing else ''}not begun, because the best rates are not known yet: {', '.join(unknown)}"
    return text + "."


def _losses(cells: Mapping[tuple[str, int], Case]) -> str:
    end = "\n\n* The best rate is the lowest or the highest that was tried."
    return (
        "## Losses\n\n"
        f"Held-out loss at each method's best rate: mean (lowest to highest of {len(SEEDS)} seeds), then the rate.\n\n"
        + table(
            ["Method", *(f"{count(n)}, {STEPS[n]} steps each" for n in _WIDTHS)],
            ([method.label, *(_cell(cells[name, n]) for n in _WIDTHS)] for name, method in METHODS.items()),
        )
        + (end if any(each.at_the_end for each in cells.values()) else "")
    )


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
    return (
        "## What energy matching changes\n\n"
        "Mean loss of the first minus that of the second, each at its best rate; below zero the "
        "first is better. **Bold**: the ranges over the seeds don't overlap.\n\n"
        + table(["First", "Second", *map(count, _WIDTHS)], rows)
    )


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
        steps, samples = (measured(case(SHARED, 1, length), results) for length in (STEPS[n], n * STEPS[n]))
        known = [each for name in METHODS if (each := cells[name, n]).summary.loss.count]
        first = min(known, key=lambda each: each.summary.loss.mean, default=None)
        complete = all(cells[name, n].summary.complete or cells[name, n].best is None for name in METHODS)
        label = METHODS[first.case.method].label + ("" if complete else ", so far") if first else "–"
        rows.append([n, _cell(steps), _cell(first) if first else "not run", _cell(samples), label])
    heads = ["n", "AdamW alone, as many steps", "n workers, the best method", "AdamW alone, as many samples", "Best method"]
    return (
        "## Beside one worker\n\n"
        "One worker's AdamW (at its best rate) with as many steps as each of n workers has, and with as "
        "many samples as all of them have, which takes n times as long. The last column names the method of the third.\n\n"
        + table(heads, rows)
    )


def _rates(cells: Mapping[tuple[str, int], Case]) -> str:
    rows = [
        [method.label, *(f"{best.rate:g}" if (best := cells[name, n].best) else "–" for n in _WIDTHS)]
        for name, method in METHODS.items()
    ]
    return (
        "## The learning rate\n\n"
        "The best rate of each method; AdamW's own with one worker is in the row of the shared AdamW as it comes.\n\n"
        + table(["Method", *map(count, _WIDTHS)], rows)
    )


def _kappas(results: Results) -> str:
    rows = []
    for each in sorted(matched_cases(), key=lambda run: (MATCHED.index(run.method), run.workers)):
        found = by_kappa(each, results)
        texts = [_text(found[kappa]) if kappa in found else "not run" for kappa in KAPPAS]
        rows.append([METHODS[each.method].label, each.workers, *texts])
    heads = ["Method", "Workers", *(f"κ = {kappa:g}" for kappa in KAPPAS)]
    return "## κ\n\nHeld-out loss at the rate that was best with the default κ.\n\n" + table(heads, rows)


def _mnist(results: Results) -> str:
    rows = []
    for name in ON_SERVER:
        each = measured(mnist_case(name), results)
        accuracy = spread(outcome.accuracy for outcome in each.summary.outcomes)
        rows.append([METHODS[name].label, f"{accuracy.text('{:.2f}', 100)} %", _cell(each)])
    return (
        f"## MNIST with {MNIST_WORKERS} workers\n\n"
        f"The paper's convolutional network, {MNIST_STEPS} steps of each worker, batch "
        f"{MNIST_BATCH}. Test accuracy at the rate with the lowest test loss.\n\n"
        + table(["Method", "Test accuracy", "Test loss, rate"], rows)
    )


def _conditions(cells: Mapping[tuple[str, int], Case], conditions: Mapping[str, Any]) -> str:
    where = "not run yet."
    if conditions:
        where = (
            f"{conditions['processor']}, {conditions['cores']} cores, {conditions['memory_bytes'] / 2**30:.0f} GiB, "
            f"{conditions['system']}; Python {conditions['python']}, PyTorch {conditions['torch']}. "
            "The machine did other work at the same time."
        )
    staleness = {
        n: spread(outcome.staleness for (_, width), each in cells.items() if width == n for outcome in each.summary.outcomes)
        for n in _WIDTHS
    }
    known = ", ".join(f"{each.text('{:.1f}')} with {count(n)}" for n, each in staleness.items() if each.count)
    windows = [STEPS[n] // 32 for n in _WIDTHS if n > 1]
    steps = ", ".join(f"{count(n)} × {steps} steps" for n, steps in sorted(STEPS.items()))
    return _CONDITIONS.format(
        machine=where, staleness=known or "not measured yet", steps=steps, seed=SEEDS[0], fewest=min(windows), most=max(windows)
    )


def _number(loss: float) -> str:
    return "diverged" if math.isinf(loss) else f"{loss:.3f}"
