"""What gem-ctl status and top say of a run with another optimizer than SGD."""

from __future__ import annotations

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_ctl import picture, text


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


def test_the_live_view_leaves_out_what_an_optimizer_does_not_use() -> None:
    line = {
        optimizer: picture._settings(
            pb.GetStatusResponse(hyperparameters=Hyperparameters(optimizer=optimizer).to_message())
        ).plain
        for optimizer in ("sgd", "adamw", "worker")
    }
    assert "η 0.05, μ 0.9" in line["sgd"]
    assert "η 0.05, κ 1" in line["adamw"]
    assert "η" not in line["worker"]
    assert "optimizer worker" in line["worker"]
