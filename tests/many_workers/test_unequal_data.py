"""Workers that differ, with data that differ: who commits how often, who has which samples, and how a rate is chosen."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gem_worker.tasks import load_task

from benchmarks.unequal_data import runs
from benchmarks.unequal_data.page import write_page
from benchmarks.unequal_data.runs import (
    BATCH,
    CHOICE_SEED,
    GRADIENTS,
    METHODS,
    SEEDS,
    SLOWER,
    WORKERS,
    Case,
    Digits,
    Outcome,
    measure,
    reported,
    rounds,
    stored,
    turns,
    wanted,
)

TASK = load_task("digits", None)
LAST = WORKERS - 1


def test_a_slow_worker_commits_as_much_less_often() -> None:
    counts = Counter(turn.worker for turn in turns(10, 0))
    assert counts.total() == GRADIENTS
    assert counts[LAST] == pytest.approx(GRADIENTS / 91, rel=0.4)
    assert min(counts[worker] for worker in range(LAST)) > 5 * counts[LAST]


def test_those_who_wait_make_fewer_steps_in_the_same_time() -> None:
    equal, slow = (len(list(rounds(slower, 0))) for slower in (1, 10))
    assert equal == pytest.approx(GRADIENTS / WORKERS / sum(1 / k for k in range(1, WORKERS + 1)), rel=0.15)
    assert slow == pytest.approx(GRADIENTS / 9.1 / 10.5, rel=0.3)  # the mean of the slowest of ten, nearly always the last


def test_only_the_last_worker_has_the_rare_digits() -> None:
    digits, random, data = Digits(TASK), np.random.default_rng(0), TASK.training_data()

    def labels(worker: int, count: int) -> set[int]:
        return {int(data[sample][1]) for sample in digits.draw(worker, count, random)}

    assert labels(LAST, BATCH) == {8, 9}
    assert labels(0, BATCH) <= set(range(8))
    assert labels(0, BATCH * WORKERS) == set(range(10)), "a synchronous step has everyone's samples"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "GRADIENTS", 20)
    outcome = measure(Case(method, 3, METHODS[method].rates[0], 0), TASK, Digits(TASK))
    assert math.isfinite(outcome.loss)
    assert 0 <= outcome.rare <= 1


def test_a_rate_is_chosen_on_one_seed_and_reported_on_others(tmp_path: Path) -> None:
    store = stored(tmp_path / "results.json")
    best = METHODS["gem"].rates[1]
    for case in wanted(SLOWER, lambda case: store[case].loss):
        assert case not in store
        store.add(case, Outcome(abs(case.rate - best) if case.rate < 0.1 else math.inf, 0.9, 0.5))
    again = stored(tmp_path / "results.json")
    found = reported(again, "gem", 10)
    assert found is not None
    assert (found[0], len(found[1])) == (best, len(SEEDS))
    assert {case.seed for case in again if case.rate != best and case.method == "gem"} == {CHOICE_SEED}
    assert "| GEM | 50 % (50–50) |" in write_page(again, tmp_path).read_text(encoding="utf-8")
