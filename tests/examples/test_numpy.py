"""examples/numpy: two processes train on one server; the gradient is right; no PyTorch is needed."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from kit.examples import ROOT, workers_of
from kit.server import config, serving

SCRIPT = "examples/numpy/train.py"
LINE = re.compile(r"(\d+) commits of this worker, (\d+) of all; accuracy ([\d.]+)% before, ([\d.]+)% after")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names of the script, which is not run as a worker here."""
    return runpy.run_path(str(ROOT / SCRIPT))


def test_two_workers_share_the_epochs_and_learn() -> None:
    settings = Hyperparameters(epochs=20, batch_size=32, learning_rate=0.1)
    with serving(config(settings, min_workers=2)) as live:
        output = workers_of(SCRIPT, live.address)
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == 20 * 3_000
    told = [LINE.search(text) for text in output]
    assert all(told), output
    figures = [[float(figure) for figure in line.groups()] for line in told if line]
    assert sum(line[0] for line in figures) == figures[0][1], "the workers' commits are not the run's"
    assert all(line[0] > 0 for line in figures), "one worker did everything"
    (_, *total, _, after), (_, *same_total, _, same_after) = figures
    assert (total, after) == (same_total, same_after), "the workers ended with different models"
    assert min(line[2] for line in figures) < 50  # the other worker may have joined when some commits were made
    assert after > 90


def test_the_gradient_is_that_of_finite_differences(example: dict[str, Any]) -> None:
    points, arms = example["spirals"](16, seed=5)
    model = {name: value.astype(np.float64) for name, value in example["first_values"](seed=3).items()}
    _, gradient = example["loss_and_gradient"](model, points, arms)
    random = np.random.default_rng(0)
    for name, value in model.items():
        direction = random.normal(size=value.shape)
        there, back = ({**model, name: value + step * direction} for step in (1e-5, -1e-5))
        losses = [example["loss_and_gradient"](moved, points, arms)[0] for moved in (there, back)]
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx(float((gradient[name] * direction).sum()), rel=1e-5, abs=1e-8), name


def test_it_needs_no_pytorch() -> None:
    code = f"import runpy, sys; runpy.run_path({SCRIPT!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
