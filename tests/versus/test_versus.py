"""The comparison with DDP and others: the table of times, the choice of rates, when a loss counts as reached, the page."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.versus.analysis import cell, ratio
from benchmarks.versus.measure import stored
from benchmarks.versus.outcome import Outcome, Point, Run, crossing, outcome, thinned
from benchmarks.versus.plan import Case, Choice, Results, best_rate, missing, rates
from benchmarks.versus.profiles import PROFILES

DDP, OURS = Case("ddp", "transformer", 8), Case("gem", "transformer", 8)


def reached(units: float | None, lowest: float = 2.2) -> Outcome:
    """A made-up outcome: the higher loss after half of the time."""
    higher = None if units is None else units / 2
    return Outcome((higher, units), (1000, None if units is None else 2000), (10, 20), lowest, False, (), 30.0)


def by_rate(best: float) -> Results:
    """Made-up results: the further a rate from the best one, the later."""
    return lambda run: reached(100 + 50 * abs(math.log(run.rate / best)) + run.seed % 10)


@pytest.mark.parametrize("name", PROFILES)
def test_times_depend_on_seed_worker_and_step_alone(name: str) -> None:
    first, again = (PROFILES[name].times(1, 2, 8) for _ in range(2))
    assert [first(step) for step in range(600)] == [again(step) for step in reversed(range(600))][::-1]
    assert first(0) != PROFILES[name].times(2, 2, 8)(0) != PROFILES[name].times(2, 3, 8)(0)


def test_the_mean_time_of_an_equal_worker_is_one_unit() -> None:
    for name in ("equal", "noisy", "exponential"):
        time = PROFILES[name].times(0, 0, 8)
        assert sum(map(time, range(20_000))) / 20_000 == pytest.approx(1, abs=0.03)


def test_the_first_worker_is_never_killed() -> None:
    kills = [PROFILES["spot"].kills(8)(number) for number in range(50)]
    assert {worker for _, worker in kills} == set(range(1, 8))
    assert [moment for moment, _ in kills[:3]] == [20, 40, 60]


def test_the_time_to_a_loss_is_interpolated_between_the_scores_around_it() -> None:
    curve: list[Point] = [(0.0, 4.0, 0, 0), (10.0, 3.0, 100, 10), (20.0, 2.0, 300, 20)]
    assert crossing(curve, 2.5) == (15, 200, 15)
    assert crossing(curve, 2.0) == (20, 300, 20)
    assert crossing(curve, 1.9) is None


def test_the_first_score_below_a_loss_counts_although_a_later_one_is_above() -> None:
    curve: list[Point] = [(0.0, 4.0, 0, 0), (2.0, 2.0, 20, 2), (4.0, 3.5, 40, 4), (6.0, 1.0, 60, 6)]
    assert crossing(curve, 3.0) == (1, 10, 1)


def test_a_loss_that_is_not_finite_reaches_nothing() -> None:
    found = outcome([(0.0, 4.0, 0, 0), (2.0, None, 20, 2), (4.0, 2.0, 40, 4)], (3.0, 1.0), True, 5.0)
    assert (found.units, found.samples, found.lowest, found.diverged) == ((4.0, None), (40, None), 2.0, True)


def test_a_long_curve_keeps_its_ends() -> None:
    curve: list[Point] = [(float(number), 1.0, number, number) for number in range(1001)]
    kept = thinned(curve, 5)
    assert [point[0] for point in kept] == [0, 250, 500, 750, 1000]


def test_rates_go_on_while_the_best_is_the_outermost() -> None:
    assert rates(DDP, by_rate(0.01)) == [0.001, 0.003, 0.01, 0.03]
    assert rates(DDP, by_rate(0.1))[-2:] == [0.09, 0.3]
    assert (best_rate(DDP, by_rate(0.1)), best_rate(DDP, by_rate(0.01))) == (0.09, 0.01)


def test_rates_do_not_go_on_for_ever() -> None:
    assert len(rates(DDP, by_rate(1e-9))) == 7


def test_a_rate_that_reaches_the_loss_beats_one_that_comes_lower() -> None:
    results: Results = lambda run: reached(300, 2.29) if run.rate == 0.003 else reached(None, 2.31)  # noqa: E731
    assert best_rate(DDP, results) == 0.003


def test_there_is_no_best_rate_before_all_are_measured_or_if_all_diverged() -> None:
    assert best_rate(DDP, lambda run: reached(100) if run.rate < 0.02 else None) is None
    assert best_rate(DDP, lambda run: replace(reached(None), diverged=True)) is None


def test_a_failed_run_is_tried_once() -> None:
    runs = list(missing(Choice(("gem",), ("transformer",), ("equal",), (8,), 1, quick=True), lambda run: None))
    assert runs == [OURS.run("equal", 0.003, 0)]


def test_the_ratio_takes_seeds_that_both_have_and_none_if_one_failed() -> None:
    results: Results = lambda run: reached(50 if run.contender == "gem" else 100) if run.seed < 2 else None  # noqa: E731
    mine, base = cell(OURS, "noisy", 0.003, results), cell(DDP, "noisy", 0.01, results)
    assert ratio(mine, base, 1) == 0.5
    assert ratio(mine, cell(DDP, "noisy", 0.01, lambda run: reached(None if run.seed else 100)), 1) is None


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    run, found = DDP.run("equal", 0.01, 0), replace(reached(80), curve=((0.0, 4.5, 0, 0), (2.0, None, 1, 1)))
    stored(tmp_path / "results.json").add(run, found)
    assert stored(tmp_path / "results.json")[Run(**vars(run))] == found
