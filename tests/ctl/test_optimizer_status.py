"""What gem-ctl status says of a run with another optimizer than SGD."""

from __future__ import annotations

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_ctl import text


@pytest.mark.parametrize(
    ("settings", "shown", "missing"),
    [
        (Hyperparameters(), ["learning rate 0.05, momentum 0.9"], ["optimizer"]),
        (
            Hyperparameters(optimizer="adamw", learning_rate=0.001, optimizer_options="beta2=0.95", weight_decay=0.01),
            ["learning rate 0.001, batch", "optimizer   adamw", "beta2=0.95", "0.01·θ"],
            ["momentum"],
        ),
        (
            Hyperparameters(optimizer="worker", weight_decay=0.1, local_momentum=0.9, schedule="step", decay_versions=9),
            ["optimizer   worker"],
            ["momentum", "learning rate", "0.1", "0.9", "schedule"],
        ),
    ],
)
def test_the_status_names_the_optimizer_and_only_the_rates_that_count(
    settings: Hyperparameters, shown: list[str], missing: list[str]
) -> None:
    status = text.status(pb.GetStatusResponse(hyperparameters=settings.to_message()))
    for words in shown:
        assert words in status
    for words in missing:
        assert words not in status
