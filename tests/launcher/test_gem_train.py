"""gem-train as users run it, undisturbed, down to the files that a run leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
from gem_api.history import COLUMNS
from gem_api.hyperparameters import Hyperparameters
from gem_worker.tasks.convnet import ConvNet
from gem_worker.tasks.mnist import read_idx
from kit.settings import configured
from launcher.train_helpers import (
    TRAINING_SAMPLES,
    Launch,
    Launcher,
    assert_every_sample_accounted_for,
    commits,
    last_state,
    read_json,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A short run of two workers, which has ended."""
    arguments = ("--workers", "2", "--epochs", "8", "--batch-size", "32", "--seed", "3", configured(evaluate_every=0.5))
    launcher = Launcher(tmp_path_factory.mktemp("finished"), *arguments)
    try:
        launcher.wait()
        yield launcher
    finally:
        launcher.close()


def test_a_run_ends_complete_and_says_where_its_results_are(finished: Launcher) -> None:
    assert finished.process.returncode == 0, finished.output
    assert "complete after" in finished.output
    for name in ("report.html", "summary.json", "model.safetensors"):
        assert str(finished.folder / name) in finished.output
    assert "Traceback" not in finished.output
    assert_every_sample_accounted_for(finished.folder, epochs=8)
    assert finished.members() == {}


def test_the_summary_and_the_history_tell_the_run_and_all_its_settings(finished: Launcher) -> None:
    summary = read_json(finished.folder / "summary.json")
    rows = commits(finished.folder)
    assert summary["outcome"] == "complete"
    assert summary["test_accuracy"] > 0.8
    assert summary["commits"] == len(rows) == 8 * 45
    assert summary["samples"] == 8 * TRAINING_SAMPLES
    assert summary["staleness_mean"] == pytest.approx(sum(int(row["staleness"]) for row in rows) / len(rows))
    assert summary["staleness_p95"] >= summary["staleness_mean"]
    assert 0 < summary["pi_median"] <= 5
    assert summary["start_seconds"] > 0
    assert summary["seconds"] > 0
    assert (summary["rule"], summary["workers"], summary["task"]) == ("gem", 2, "digits")
    assert summary["commits_via"] == {"memory": 2}
    assert summary["hyperparameters"].keys() == {field.name for field in fields(Hyperparameters)}
    assert summary["hyperparameters"] | {"batch_size": 32, "seed": 3, "epochs": 8} == summary["hyperparameters"]
    assert summary["versions"].keys() >= {"gem-ps", "python", "torch", "numpy", "numba", "grpcio", "protobuf"}
    assert summary["run_id"] == last_state(finished.folder)["run_id"]
    assert tuple(rows[0]) == COLUMNS
    assert {row["worker"] for row in rows} == {"worker-0", "worker-1"}
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_the_model_loads_into_the_network_and_is_the_last_checkpoints(finished: Launcher) -> None:
    model = safetensors.torch.load_file(finished.folder / "model.safetensors")
    ConvNet().load_state_dict(model)
    with safetensors.safe_open(finished.folder / "model.safetensors", framework="numpy") as file:
        assert int(file.metadata()["gem_version"]) == last_state(finished.folder)["version"]
    newest = max((finished.folder / "checkpoints").glob("checkpoint-*"))
    kept = safetensors.torch.load_file(newest / "model.safetensors")
    assert all(kept[name].equal(value) for name, value in model.items())


def test_the_workers_logs_are_free_of_warnings(finished: Launcher) -> None:
    for log in (finished.folder / "logs").iterdir():
        assert not re.search(r"warning|traceback", log.read_text(), re.IGNORECASE), log.read_text()


@pytest.mark.slow
def test_four_workers_learn_mnist_in_150_steps_each(launch: Launch) -> None:
    if not MNIST.is_dir():
        pytest.skip("needs MNIST's four files")
    assert len(read_idx(MNIST, "t10k-labels-idx1-ubyte", 1)) == 10_000
    launcher = launch("--task", "mnist", "--data", str(MNIST), "--workers", "4", "--shards", "replicate", "--steps", "150")
    assert launcher.wait() == 0, launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert summary["commits"] == 600
    assert summary["test_accuracy"] >= 0.95
