"""The figure of whole trainings shows every contender in every cluster that has results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.finals import figure, plan, real
from benchmarks.finals.page import write_page
from benchmarks.finals.runs import Outcome, Run
from benchmarks.lib.style import MARKERS
from benchmarks.versus.profiles import KINDS

Results = dict[Run, Outcome]


def results(runs: Iterable[Run]) -> Results:
    """Made-up losses, no two of them equal."""
    return {run: Outcome(1.8 + 0.0007 * number, None, 300, 1600, 300) for number, run in enumerate(runs)}


def everything() -> Results:
    """Every planned run of the cluster that the figure shows, simulated and with real processes."""
    runs = [run for run in plan.runs(plan.QUESTIONS) if (run.model, run.workers, run.rounds) == ("transformer", 8, 200)]
    simulated = results(runs)
    return results([*runs, *(run for run in real.runs(simulated) if run.workers == 8)])


def expected(known: Results, profile: str, kind: str) -> dict[str, float]:
    """By contender, the mean loss, from the runs themselves; the expert's is the lowest of all designs and rates."""
    seeds: dict[tuple[str, str], list[float]] = {}
    for run, outcome in known.items():
        if run.profile == profile and outcome.loss is not None:
            seeds.setdefault((run.method, run.settings), []).append(outcome.loss)
    ours = {settings: mean(losses) for (method, settings), losses in seeds.items() if method == f"{kind}ours"}
    rounds = {settings: mean(losses) for (method, settings), losses in seeds.items() if method == f"{kind}rounds"}
    return {
        "in step": ours[plan.ours(plan.BOTH)], "before": ours[plan.ours(plan.TODAY)],
        "DDP": min(loss for settings, loss in rounds.items() if " " not in settings), "expert": min(rounds.values()),
    }  # fmt: skip


def drawn(known: Results) -> tuple[list[str], dict[tuple[int, bool], list[float]]]:
    """The clusters, and what is marked in each, by its place and whether the mark is hollow, from top to bottom."""
    made = figure.figure(known)
    assert made is not None
    axes = made.axes[0]
    marked: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for line in axes.lines:
        if str(line.get_marker()) not in MARKERS:
            continue
        hollow = line.get_markerfacecolor() == "white"
        for x, y in zip(np.asarray(line.get_xdata()), np.asarray(line.get_ydata()), strict=True):
            marked.setdefault((round(y), hollow), []).append((y, x))
    names = [label.get_text() for label in axes.get_yticklabels()]
    return names, {place: [x for _, x in sorted(found)] for place, found in marked.items()}


def texts(made: Figure | None) -> list[str]:
    assert made is not None
    return [text.get_text() for text in made.axes[0].texts]


def test_every_contender_is_drawn_in_every_cluster_with_results() -> None:
    known = everything()
    names, marked = drawn(known)
    assert names == [profile for profile in KINDS if profile in {run.profile for run in known}]
    for place, profile in enumerate(names):
        for hollow, kind in ((False, ""), (True, "real ")):
            assert marked[place, hollow] == pytest.approx(list(expected(known, profile, kind).values())), (profile, kind)


def test_what_has_no_result_is_left_out() -> None:
    where = ("transformer", "mixed", 8, 0, 200)
    assert figure.figure({}) is None
    few = results([Run(*where, "ours", plan.ours(plan.BOTH)), Run(*where, "rounds", "rate=0.01")])
    names, marked = drawn(few)
    assert (names, {place: len(found) for place, found in marked.items()}) == (["mixed"], {(0, False): 2})
    assert texts(figure.figure(few)) == []  # no best design before each was tried


def test_a_run_that_diverged_is_named_at_the_edge() -> None:
    where = ("transformer", "equal", 8, 0, 200)
    lost = {Run(*where, "ours", plan.ours(plan.TODAY)): Outcome(None, None, 200, 1600, 1600)}
    made = figure.figure(results([Run(*where, "ours", plan.ours(plan.BOTH))]) | lost)
    assert texts(made) == ["diverged →"]


def test_the_page_shows_the_figure_at_its_top(tmp_path: Path) -> None:
    known = everything()
    name = figure.draw(known, tmp_path)
    assert (tmp_path / name).exists()
    assert write_page(known, tmp_path, name).read_text(encoding="utf-8").split("\n\n")[1].endswith("(finals.png)")
    assert "![" not in write_page({}, tmp_path, figure.draw({}, tmp_path)).read_text(encoding="utf-8")
