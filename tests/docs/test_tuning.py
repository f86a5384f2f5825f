"""The measurements behind docs/tuning.md: a run can be made again, and the page shows what is stored."""

from __future__ import annotations

import pytest
import torch

from benchmarks import tuning
from benchmarks.tuning import Choice


def test_every_planned_run_has_valid_settings_and_is_planned_once() -> None:
    planned = list(tuning.plan())
    assert len(set(planned)) == len(planned)
    for choice in planned:
        choice.hyperparameters().require_valid()


def test_the_defaults_of_the_page_are_the_servers() -> None:
    settings = Choice(16, learning_rate=1e-3).hyperparameters()
    assert (settings.kappa, settings.pi_max, settings.weight_decay) == (1.5, 1.0, 0.01)


@pytest.mark.parametrize("choice", [Choice(2, learning_rate=0.01), Choice(2, "worker", 0.01, local_steps=2)])
def test_a_run_trains_to_the_end(choice: Choice) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 784, generator=generator)
    data = inputs, (inputs[:, :10].argmax(1))
    run = tuning.measure(choice, data, data)
    assert run["commits"] == 2 * 512 // tuning.BATCH // choice.local_steps
    assert run["final_loss"] < run["curves"]["loss"][0], "the loss did not fall"
    assert 0 <= run["pi_median"] <= 1
    assert len(run["curves"]["version"]) == len(run["curves"]["pi_median"]) == min(tuning.CURVE_POINTS, run["commits"])
