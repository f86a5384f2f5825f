"""Experiments with a real server and real workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.launch import RunFailed
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.runner import make

pytestmark = pytest.mark.timeout(600)
TINY = Experiment("digits", workers=2, steps=20)


def test_an_experiment_runs_for_real() -> None:
    result = make(TINY, None)
    assert str(result).startswith("complete, test accuracy ")
    assert result.curves["version"].tolist() == list(range(1, 41))
    assert (result.steps[-1], result.settings["steps"], result.settings["rule"]) == (20, 20, "gem")
    assert 2.2 < result.curves["loss"][0] < 2.4
    assert result.curves["loss"][-10:].mean() < result.curves["loss"][:10].mean()
    assert result.test_accuracy is not None
    assert 0.1 < result.test_accuracy <= 1


@pytest.mark.slow
def test_workers_that_come_and_go_are_a_run_too() -> None:
    result = make(Experiment("digits", workers=2, steps=60, setting="staged", replacements=1), None)
    assert result.outcome == "complete"
    assert result.curves["version"][-1] >= 120


def test_an_experiment_that_can_not_start_says_why(tmp_path: Path) -> None:
    wrong = Experiment("digits", rule="no-such-rule", workers=2, steps=5)
    with pytest.raises(RunFailed, match="no-such-rule"):
        make(wrong, tmp_path)
