"""The measurements behind docs/tuning.md: a run can be made again, and the page shows what is stored."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tuning
from benchmarks.tuning import Choice


def test_every_planned_run_has_valid_settings_and_is_planned_once() -> None:
    planned = list(tuning.choices())
    assert len(set(planned)) == len(planned)
    for choice in planned:
        choice.hyperparameters().require_valid()


def test_the_defaults_of_the_page_are_the_servers() -> None:
    settings = Choice(16, learning_rate=1e-3).hyperparameters()
    assert (settings.kappa, settings.pi_max, settings.weight_decay) == (1.5, 1.0, 0.01)


@pytest.mark.long
@pytest.mark.parametrize("choice", [Choice(2, learning_rate=0.01), Choice(2, "worker", 0.01, local_steps=2)])
def test_a_run_trains_to_the_end(choice: Choice, tmp_path: Path) -> None:
    labels = np.arange(1024, dtype=np.uint8) % 10
    images = np.zeros((1024, 28, 28), np.uint8)
    images[np.arange(1024), labels] = images[np.arange(1024), labels + 10] = 255  # two lines, whose places say which it is
    for prefix in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (tmp_path / f"{prefix}-{name}-ubyte").write_bytes(head + array.tobytes())
    run = tuning.measure(choice, tmp_path)
    whole = 2 * 1024 // tuning.BATCH // choice.local_steps
    if choice.optimizer == "worker":
        assert run.commits == whole
    else:
        assert whole <= run.commits <= 2 * whole, "smaller batches make more commits"
    assert run.final_loss is not None
    assert run.curves["loss"][0] is not None
    assert run.final_loss < run.curves["loss"][0], "the loss did not fall"
    assert run.pi_median is not None
    assert 0 <= run.pi_median <= 1
    assert len(run.curves["version"]) == len(run.curves["pi_median"]) == min(tuning.CURVE_POINTS, run.commits)
