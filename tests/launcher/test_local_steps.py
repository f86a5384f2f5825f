"""gem-train with rules whose workers make local steps: real processes, down to the summary."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from gem_worker.tasks.convnet import ConvNet
from kit.settings import configured

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def run(runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A whole run of two workers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
    command = [
        sys.executable,
        "-m",
        "gem_worker.launcher.cli",
        "--runs",
        str(runs),
        "--workers",
        "2",
        configured(evaluate_every=1),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def gem_train(runs: Path, *arguments: str) -> tuple[str, dict[str, Any], Path]:
    """What it printed, its summary, and the run's folder."""
    done = run(runs, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = runs.iterdir()
    return done.stdout, json.loads((folder / "summary.json").read_text()), folder


@pytest.mark.parametrize(
    ("rule", "settings", "options"),
    [
        pytest.param("agn", "", (), id="agn", marks=pytest.mark.slow),
        pytest.param("diloco", ":delay=2", ("--schedule", "constant:warmup=10"), id="diloco", marks=pytest.mark.slow),
    ],
)
def test_gem_train_learns_the_digits_with_local_steps(
    tmp_path: Path, rule: str, settings: str, options: tuple[str, ...]
) -> None:
    told, summary, folder = gem_train(
        tmp_path,
        "--rule",
        rule + settings,
        "--local-steps",
        "4",
        "--epochs",
        "0",
        "--steps",
        "60",
        "--shards",
        "replicate",
        *options,
    )
    assert (summary["outcome"], summary["rule"], summary["commits"]) == ("complete", rule, 120)
    assert summary["hyperparameters"]["local_steps"] == 4
    assert summary["samples"] > 120 * 3 * 64  # of each commit those of all its batches; a shard's last is smaller
    assert summary["pi_median"] is None
    assert summary["test_accuracy"] > 0.5
    assert re.search(r"median π +–\n", told)
    assert (folder / "report.png").stat().st_size > 10_000
    model = ConvNet()
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))


def test_an_epoch_is_trained_on_whole_where_windows_do_not_divide_it(tmp_path: Path) -> None:
    _, summary, _ = gem_train(tmp_path, "--rule", "agn", "--local-steps", "7", "--epochs", "2", "--batch-size", "32")
    assert summary["samples"] >= 2 * 1438
    assert summary["leases_ended"].keys() <= {"left"}


def test_workers_that_do_not_fit_the_run_end_it_at_once_and_say_why(tmp_path: Path) -> None:
    done = run(tmp_path, "--rule", "agn", "--local-steps", "3", "--overlap")
    assert done.returncode == 1
    assert "overlap is not available in this run" in done.stderr
    assert "again" not in done.stdout  # nobody was started a second time
