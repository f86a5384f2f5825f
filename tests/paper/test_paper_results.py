"""The result file of an experiment: curves with fewer points, in a file that is written completely or not at all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gem_worker.launcher.run_folder import RunFolder
from paper.paper_helpers import made_up

from benchmarks.paper.experiments import Experiment
from benchmarks.paper.results import read_run, stored, thin
from benchmarks.paper.runner import read_metrics


def test_thinning_makes_means_of_the_numbers_around_a_version() -> None:
    loss = np.where(np.arange(1000) % 2, 1.0, math.nan)
    loss[:500] = math.inf
    kept = thin({"version": np.arange(1000.0), "loss": loss})
    assert 200 <= len(kept["version"]) == len(kept["loss"]) <= 400
    assert (np.diff(kept["version"]) > 0).all()
    assert np.isnan(kept["loss"][:124]).all()
    assert kept["loss"][126:] == pytest.approx(1)


def test_a_result_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    experiment = Experiment("digits", workers=4, rule_options="a=1")
    saved = made_up(experiment)
    saved.curves["loss"][3] = math.nan
    stored(tmp_path).add(experiment, saved)
    loaded = stored(tmp_path)[experiment]
    for name, column in saved.curves.items():
        np.testing.assert_allclose(loaded.curves[name], column, rtol=1e-5)
    assert replace(loaded, curves={}, evaluations={}, tensors={}) == replace(saved, curves={}, evaluations={}, tensors={})


def test_a_runs_folder_becomes_a_result(tmp_path: Path) -> None:
    """Samples of a commit that the rule discarded were not trained on."""
    folder = RunFolder(tmp_path)
    columns = "version,unix_seconds,worker,discarded,staleness,loss,samples,pi_median"
    rows = "1,100.5,a,0,0,2.5,64,1.0\n2,101.0,b,0,1,,64,\n2,102.0,b,1,9,2.4,64,\n3,102.5,a,0,1,1.5,32,0.5\n"
    folder.commits.write_text(f"{columns}\n{rows}")
    summary = {
        "outcome": "complete",
        "test_accuracy": 0.5,
        "test_loss": None,
        "seconds": 4.0,
        "hyperparameters": {},
        "versions": {},
    }
    folder.summary.write_text(json.dumps(summary))
    folder.evaluations.write_text('[{"version": 3, "loss": 1.0, "accuracy": 0.5}]')
    result = read_run(Experiment("digits", workers=2), folder, {})
    assert result.curves["samples"].tolist() == [64, 128, 160]
    assert result.curves["seconds"].tolist() == [0, 1.0, 2]
    assert result.steps.tolist() == [0.5, 1, 1.5]
    assert (result.outcome, result.test_accuracy, result.test_loss) == ("complete", 0.5, None)
    assert result.evaluations["accuracy"].tolist() == [0.5]


METRICS = """# HELP gem_central_version Commits applied.
# TYPE gem_central_version gauge
gem_central_version 1200.0
# TYPE gem_pi_tensor_median gauge
gem_pi_tensor_median{tensor="conv1.weight"} 0.25
gem_pi_tensor_median{tensor="fc3.bias"} 1.5
# TYPE gem_pi_median gauge
gem_pi_median 0.7
"""


def test_version_and_tensors_are_read_off_the_servers_metrics() -> None:
    assert read_metrics(METRICS) == (1200, {"conv1.weight": 0.25, "fc3.bias": 1.5})
    assert read_metrics("") == (0, {})
