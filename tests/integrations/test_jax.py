"""examples/jax: two processes train on one server without a flag, by the steps of their own optax."""

from __future__ import annotations

import re

import pytest
from gem_api.hyperparameters import Hyperparameters
from kit.examples import workers_of
from kit.server import config, serving

LINE = re.compile(r"(\d+) commits of this worker, (\d+) of all; loss ([\d.]+)")
UNTRAINED = 0.5  # the loss of a model that says 0 everywhere: half of the sine's amplitude squared


@pytest.mark.long
def test_two_workers_share_the_epochs_and_learn() -> None:
    settings = Hyperparameters(epochs=30)
    with serving(config(settings, min_workers=2)) as live:
        output = workers_of("examples/jax/train.py", live.address)
        assert live.on_loop(lambda: live.core.ledger.samples_completed) == settings.epochs * 2048
    told = [LINE.search(text) for text in output]
    assert all(told), output
    figures = [[float(figure) for figure in line.groups()] for line in told if line]
    assert sum(line[0] for line in figures) == figures[0][1], "the workers' commits are not the run's"
    assert figures[0][1:] == figures[1][1:], "the workers ended with different models"
    assert figures[0][2] < UNTRAINED / 5
