"""Runs as trials of a real Ray Tune: it gets their metrics, and stops one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.ray_cluster import RayCluster, ray_cluster
from gem_worker.ray.tune import trainable
from launcher.train_helpers import assert_every_sample_accounted_for, command_lines, last_state, read_json
from ray import tune

pytestmark = pytest.mark.timeout(600)
WHOLE, ENDLESS = 4, 1_000_000  # epochs


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(4, joined=True) as cluster:
        yield cluster


def stop(trial: str, result: dict[str, Any]) -> bool:
    """Ends the trial that would never end, after its first evaluation."""
    return bool(result["config"]["epochs"] == ENDLESS)


@pytest.mark.usefixtures("cluster")
def test_two_trials_report_metrics_and_one_is_stopped(tmp_path: Path) -> None:
    trial = trainable("digits", workers=1, runs=tmp_path / "runs", evaluate_every=0.2)
    tuner = tune.Tuner(
        trial,
        param_space={"epochs": tune.grid_search([WHOLE, ENDLESS])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), stop=stop, verbose=0),
    )
    complete, stopped = sorted(tuner.fit(), key=lambda result: result.config["epochs"])
    assert (complete.error, stopped.error) == (None, None)

    folder = Path(complete.metrics["folder"])
    summary = read_json(folder / "summary.json")
    assert (summary["outcome"], complete.metrics["done"]) == ("complete", True)
    for name in ("test_loss", "test_accuracy"):
        assert complete.metrics[name] == summary[name]
    assert (complete.metrics["version"], complete.metrics["epoch"]) == (summary["commits"], WHOLE - 1)
    assert_every_sample_accounted_for(folder, WHOLE)

    folder = Path(stopped.metrics["folder"])
    assert stopped.metrics["training_iteration"] == 1
    assert read_json(folder / "summary.json")["outcome"] == "stopped"
    assert last_state(folder)["ledger"]["held"] == [], "its worker left, and its server wrote a checkpoint after that"
    assert not [line for _, line in command_lines() if str(tmp_path / "runs") in line]


def test_what_tune_reserves_for_a_trial() -> None:
    trial = trainable("digits", workers=32, processes=2, resources_per_worker={"CPU": 2, "GPU": 1})
    own, gpu = {"CPU": 1}, {"CPU": 2, "GPU": 1}
    assert trial.default_resource_request({}).bundles == [own, gpu, gpu]
    assert trial.default_resource_request({"workers": 1}).bundles == [own, gpu]
    assert trainable().default_resource_request({}).bundles == [own] * 5


def test_a_trial_does_not_take_over_the_state_of_another() -> None:
    """As population based training would have it."""
    trial = trainable()()
    trial.load_checkpoint(trial.save_checkpoint(""))
    with pytest.raises(ValueError, match="can't go on from gem_1: the state of a run is its server's"):
        trial.load_checkpoint({"run": "gem_1"})
