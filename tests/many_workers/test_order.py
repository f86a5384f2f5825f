"""Whose commit comes next in the simulation of many workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.many_workers.order import Turn, recorded, simulated
from benchmarks.paper.experiments import Experiment


def staleness(turns: list[Turn]) -> list[int]:
    """τ of every commit but each worker's first."""
    last: dict[int, int] = {}
    found = []
    for version, turn in enumerate(turns):
        if turn.worker in last:
            found.append(version - last[turn.worker])
        last[turn.worker] = version + 1
    return found


def turns(workers: int, steps: int, spread: float, varied: float = 0.0, seed: int = 0, wait: float = 0.0) -> list[Turn]:
    case = Experiment(
        "mnist", workers=workers, steps=steps, spread=spread, batch_variation=varied, seed=seed, reply_wait=wait
    )  # fmt: skip
    return list(simulated(case))


def test_workers_that_are_all_alike_march_in_lockstep() -> None:
    assert set(staleness(turns(50, 20, 0.0))) == {49}


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("varied", [0.0, 0.9])
def test_every_worker_makes_its_commits(spread: float, varied: float) -> None:
    assert Counter(turn.worker for turn in turns(30, 12, spread, varied)) == dict.fromkeys(range(30), 12)


def test_the_spread_of_compute_times_is_that_of_staleness() -> None:
    for spread in (0.1, 0.5, 1.0):
        middle = staleness(turns(200, 60, spread))[200 * 10 : 200 * 40]
        assert np.mean(middle) == pytest.approx(199, rel=0.05)
        assert np.std(middle) / 200 == pytest.approx(spread, rel=0.15)


def test_batches_vary_around_their_mean() -> None:
    sizes = [turn.samples for turn in turns(100, 50, 0.05, 0.9)]
    assert (min(sizes), max(sizes)) == (6, 122)
    assert np.mean(sizes) == pytest.approx(64, rel=0.02)


def test_workers_whose_replies_wait_compute_on_the_theta_of_one_round() -> None:
    made = turns(20, 40, 0.03, wait=0.15)
    assert sum(turn.samples > 0 for turn in made) == 20 * 40
    version, bases, ages = 0, [0] * 20, list[int]()
    for turn in made:
        version += turn.samples > 0
        ages.append(version - 1 - bases[turn.worker] if turn.samples else -1)
        bases[turn.worker] = version
    later = [age for age in ages[len(ages) // 2 :] if age >= 0]
    assert np.mean(later) < 12  # of 19 if no reply waits: 9.5 if all workers got the round's last θ


def test_a_recorded_order_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "commits.csv"
    file.write_text("version,worker,samples\n1,b,64\n2,a,64\n3,b,32\n")
    assert list(recorded(file)) == [Turn(0, 64), Turn(1, 64), Turn(0, 32)]
