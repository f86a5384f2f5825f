"""The page about many workers, from made-up results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.many_workers.check import Comparison
from benchmarks.many_workers.page import write_page
from benchmarks.many_workers.runs import Run, experiment, number_cases, order_cases, stored
from benchmarks.paper.experiments import Experiment

CHECK = Comparison(30, ([2.0, 1.0], [2.1, 0.9]), (0.98, 0.97))


def run(case: Experiment) -> Run:
    """A run whose loss falls to 1, leaps to 1 + 1/spread, and falls to 0.5."""
    losses = (2.0, 1.0, 1.0 + 1 / case.spread, 0.5)
    row = {"accuracy": 0.9 + case.seed / 100, "moved": 1.0, "largest_moment": 2.0, "proxy": 0.5, "mean_moment": 0.1}
    return Run(case, [{"version": case.workers * (number + 1.0), "loss": loss, **row} for number, loss in enumerate(losses)])


def page(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_all_results_make_tables_and_pictures(tmp_path: Path) -> None:
    write_page({case: run(case) for case in [*order_cases(), *number_cases()]}, [CHECK], {}, {}, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "order.png", "energies.png", "number.png"}
    assert "are means of 2 seeds, others" in page(tmp_path)
    assert "| 0.5 | 6.1 | 2.00 | 90.50 % | 2.00 | 90.50 % |" in page(tmp_path)
    assert "| 300 | 20.00 | 90.00 % | 1.00 | 90.00 % |" in page(tmp_path)
    assert "| 30 | simulation | 2.10, 0.90 | 97.00 % |" in page(tmp_path)


def test_the_page_says_what_is_missing(tmp_path: Path) -> None:
    some = [case for case in order_cases() if case.seed == 0 and case.batch_variation == 0]
    write_page({case: run(case) for case in some}, [], {}, {}, tmp_path)
    assert f"up to 2 seeds; {len(order_cases()) - len(some)} runs are missing" in page(tmp_path)
    assert "| both | – | – |" in page(tmp_path)


def test_a_run_that_diverged_is_stored_and_shown(tmp_path: Path) -> None:
    case = experiment()
    diverged = Run(case, [{"version": 100.0, "loss": 2.0, "accuracy": 0.1}, {"version": 130.0, "loss": float("nan")}])
    stored(tmp_path / "runs.json").add(case, diverged)
    known = stored(tmp_path / "runs.json")
    assert known[case].leap == float("inf")
    write_page(known, [], {}, {}, tmp_path)
    assert "| 0.05 | 3.8 | inf | nan % |" in page(tmp_path)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_case_is_a_setting_that_the_server_takes(seed: int) -> None:
    for case in (replace(case, seed=seed) for case in {*order_cases(), *number_cases()}):
        case.hyperparameters().require_valid()
