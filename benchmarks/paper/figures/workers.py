"""Figs. 1 to 3, what more workers do to the loss, the accuracy, and π; Figs. 6 and 8, a learning rate that is too large, an
amplified proxy; Figs. 9 and 10, the π of each tensor."""

from __future__ import annotations

from matplotlib.axes import Axes

from benchmarks.lib.page import count
from benchmarks.paper.plan import BASIC_RULES, PAPERS_WORKERS, Scale
from benchmarks.paper.statistics import (
    CHANCE,
    Band,
    Measured,
    accuracy,
    band,
    failed,
    final_loss,
    mean_pi,
    over_seeds,
    smooth,
    worker_steps,
)
from benchmarks.paper.style import RULE_COLOURS, RULE_NAMES, Drawing, legend, loss_axes, palette, panels, pi_axes, shades

_TENSOR_COLUMNS = 5  # panels in a row


def loss(measured: list[Measured], scale: Scale) -> Drawing:
    """Fig. 1: the training loss over worker steps, a panel for each number of workers; final loss and accuracy."""
    counts = sorted({each.experiment.workers for each in measured})
    columns = 2 if len(counts) <= 2 else 3
    drawing, axes = panels(-(-(len(counts) + 2) // columns), columns, "Fig. 1: training loss under three rules")
    for place, n in zip(axes, counts, strict=False):
        rule_lines(drawing, place, f"{n} workers", [each for each in measured if each.experiment.workers == n])
    last, best = axes[len(counts) : len(counts) + 2]
    for rule in BASIC_RULES:
        mine = [each for each in measured if each.experiment.rule == rule]
        x = [float(each.experiment.workers) for each in mine]
        drawing.points(last, "final loss", RULE_NAMES[rule], x, [final_loss(each.results) for each in mine], RULE_COLOURS[rule])
        drawing.points(
            best, "test accuracy", RULE_NAMES[rule], x, [accuracy(each.results) for each in mine], RULE_COLOURS[rule], 100
        )
    last.axhline(CHANCE, color="#999999", linestyle=":", label="chance")
    loss_axes(last, "final training loss", "workers", "mean of the last tenth of the run")
    best.set(title="test accuracy", xlabel="workers", ylabel="%", ylim=(0, 102))
    legend(best)
    for empty in axes[len(counts) + 2 :]:
        empty.set_axis_off()
    return drawing


def rule_lines(drawing: Drawing, axes: Axes, title: str, measured: list[Measured]) -> None:
    """A line for each rule; the legend says how many runs did not learn."""
    for each in measured:
        rule, bad = each.experiment.rule, failed(each.results)
        label = RULE_NAMES[rule] + (f" ({bad} of {len(each.results)} did not learn)" if bad else "")
        drawing.line(axes, title, label, band(each.results, worker_steps, "loss"), RULE_COLOURS[rule])
    axes.axhline(CHANCE, color="#999999", linestyle=":")
    loss_axes(axes, title)


def many(measured: list[Measured], scale: Scale) -> Drawing:
    """Fig. 2: training loss and test accuracy of the largest number of workers."""
    each = measured[0]
    n = each.experiment.workers
    drawing, (left, right) = panels(1, 2, f"Fig. 2: {n} workers under GEM, {each.experiment.steps} steps each")
    drawing.line(left, "loss", f"{n} workers", band(each.results, worker_steps, "loss"), RULE_COLOURS["gem"])
    loss_axes(left, "training loss")
    curves = [(run.evaluations["version"] / n, 100 * run.evaluations["accuracy"]) for run in each.results]
    curve = over_seeds([pair for pair in curves if len(pair[0])])
    label = f"final θ: {accuracy(each.results).text('{:.2f}', 100)} %"
    drawing.line(right, "test accuracy", label, curve, RULE_COLOURS["gem"])
    right.axhline(99.38, color="#c0392b", linestyle="--", linewidth=1, label=f"the paper, {PAPERS_WORKERS} workers: 99.38 %")
    right.set(title="test accuracy", xlabel="worker steps (commits / workers)", ylabel="%", ylim=(90, 100))
    right.legend(fontsize=8, loc="lower right")
    return drawing


def pi(measured: list[Measured], scale: Scale) -> Drawing:
    """Fig. 3: the median π over worker steps, a line for each number of workers."""
    drawing, (axes,) = panels(1, 1, "Fig. 3: median scaling factor π under GEM", 7, 4)
    for each, colour in zip(measured, shades(len(measured)), strict=True):
        drawing.line(axes, "pi", each.label, band(each.results, worker_steps, "pi_median"), colour)
    pi_axes(axes, "", "median of π over the parameters of a commit")
    return drawing


def misspecified(measured: list[Measured], scale: Scale) -> Drawing:
    """Fig. 6: the three rules at twice the learning rate."""
    counts = sorted({each.experiment.workers for each in measured})
    drawing, axes = panels(1, len(counts), "Fig. 6: a misspecified learning rate, η = 0.1", 5.6, 3.8)
    for place, n in zip(axes, counts, strict=True):
        rule_lines(drawing, place, f"{n} workers", [each for each in measured if each.experiment.workers == n])
    return drawing


def kappas(measured: list[Measured], scale: Scale) -> Drawing:
    """Fig. 8: GEM with its proxy amplified by κ: the final loss, and the median π."""
    drawing, (left, right) = panels(1, 2, "Fig. 8: the proxy amplified by κ")
    counts = sorted({each.experiment.workers for each in measured})
    for n, colour in zip(counts, palette(len(counts)), strict=True):
        mine = [each for each in measured if each.experiment.workers == n]
        kappa = [each.experiment.kappa for each in mine]
        label = count(n)
        drawing.points(left, "final loss", label, kappa, [final_loss(each.results) for each in mine], colour)
        drawing.points(right, "median π", label, kappa, [mean_pi(each.results) for each in mine], colour)
    left.set(title="final training loss", xlabel="κ", ylabel="mean of the last tenth of the run", xticks=scale.kappas)
    left.set_ylim(bottom=0)
    right.set(title="median π, mean over the run", xlabel="κ", xticks=scale.kappas, yscale="log")
    for axes in (left, right):
        legend(axes)
    return drawing


def medians(measured: list[Measured], scale: Scale) -> Drawing:
    """A panel for each tensor, biases last; a line for each number of workers. All panels have the same axes."""
    names = [name for name in measured[0].results[0].tensors if name != "version"]
    names.sort(key=lambda name: name.endswith("bias"))
    columns = min(_TENSOR_COLUMNS, len(names))
    drawing, axes = panels(
        -(-len(names) // columns),
        columns,
        "Figs. 9 and 10: median π of each tensor under GEM, sampled twice a second",
        2.8,
        2.8,
    )
    for place, name in zip(axes, names, strict=False):
        for each, colour in zip(measured, palette(len(measured)), strict=True):
            drawing.line(place, name, each.label, _median(each, name), colour)
        pi_axes(place, name)
    top = max(place.get_ylim()[1] for place in axes[: len(names)])
    for place in axes[: len(names)]:
        place.set_ylim(top=top)
        place.label_outer()
    for empty in axes[len(names) :]:
        empty.set_axis_off()
    return drawing


def _median(each: Measured, tensor: str) -> Band:
    """The smoothed median π of one tensor over worker steps."""
    return over_seeds([
        (run.tensors["version"] / run.experiment.workers, smooth(run.tensors[tensor], 0.1))
        for run in each.results
        if tensor in run.tensors
    ])  # fmt: skip
