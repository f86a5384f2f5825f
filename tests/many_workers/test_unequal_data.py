"""Workers that differ, with data that differ: who commits how often, who has which samples, and how a rate is chosen."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gem_worker.tasks import load_task

from benchmarks.finals.clock import SIZES
from benchmarks.unequal_data import runs

TASK = load_task("digits", None)
LAST = runs.WORKERS - 1


def test_a_slow_worker_commits_as_much_less_often() -> None:
    counts = Counter(turn.worker for turn in runs.turns(10, 0))
    assert counts.total() == runs.GRADIENTS
    assert counts[LAST] == pytest.approx(runs.GRADIENTS / 91, rel=0.4)
    assert min(counts[worker] for worker in range(LAST)) > 5 * counts[LAST]


def test_those_who_wait_make_fewer_steps_in_the_same_time() -> None:
    equal, slow = (len(list(runs.rounds(slower, 0))) for slower in (1, 10))
    assert equal == pytest.approx(runs.GRADIENTS / runs.WORKERS / sum(1 / k for k in range(1, runs.WORKERS + 1)), rel=0.15)
    assert slow == pytest.approx(runs.GRADIENTS / 9.1 / 10.5, rel=0.3)  # the mean of the slowest of ten, nearly always the last


def test_in_step_a_slow_worker_has_smaller_batches_and_more_commits() -> None:
    sizes = [event.size for event in runs.in_step(10, 0) if event.size and event.worker == LAST]
    assert len(sizes) > 3 * runs.GRADIENTS / 91
    assert np.mean(sizes) < SIZES / 4
    assert sum(sizes) / SIZES == pytest.approx(runs.GRADIENTS / 91, rel=0.4), "as many samples"


def test_only_the_last_worker_has_the_rare_digits() -> None:
    digits, random, data = runs.Digits(TASK), np.random.default_rng(0), TASK.training_data()

    def labels(worker: int, count: int) -> set[int]:
        return {int(data[sample][1]) for sample in digits.draw(worker, count, random)}

    assert labels(LAST, runs.BATCH) == {8, 9}
    assert labels(LAST, runs.BATCH // 8) <= {8, 9}
    assert labels(0, runs.BATCH) <= set(range(8))
    assert labels(0, runs.BATCH * runs.WORKERS) == set(range(10)), "a synchronous step has everyone's samples"


@pytest.mark.parametrize("method", runs.METHODS)
def test_every_method_trains(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "GRADIENTS", 20)
    outcome = runs.measure(runs.Case(method, 3, runs.METHODS[method].rates[0], 0), TASK, runs.Digits(TASK))
    assert math.isfinite(outcome.loss)
    assert 0 <= outcome.rare <= 1


def test_a_rate_is_chosen_on_one_seed_and_reported_on_others(tmp_path: Path) -> None:
    store = runs.stored(tmp_path / "results.json")
    best = runs.METHODS["gem"].rates[1]
    for case in runs.wanted(runs.SLOWER, store):
        assert case not in store
        store.add(case, runs.Outcome(abs(case.rate - best) if case.rate < 0.1 else math.inf, 0.9, 0.5))
    again = runs.stored(tmp_path / "results.json")
    found = runs.reported(again, "gem", 10)
    assert found is not None
    assert (found[0], len(found[1])) == (best, len(runs.SEEDS))
    assert {case.seed for case in again if case.rate != best and case.method == "gem"} == {runs.CHOICE_SEED}
