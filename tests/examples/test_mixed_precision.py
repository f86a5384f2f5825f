"""The example of BatchNorm and mixed precision: a batch that overflows is left out, and the run is complete all the same."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from kit.pages import ROOT
from kit.server import config, serving

SETTINGS = Hyperparameters(epochs=5)
SAMPLES = 1437  # in batches of 64


@pytest.mark.parametrize(("scale", "overflows"), [("65536", False), ("1e9", True)])
def test_what_overflows_is_skipped_and_every_other_sample_is_trained_on(
    scale: str, overflows: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with serving(config(SETTINGS)) as live:
        monkeypatch.setattr(sys, "argv", ["train.py", "--server", live.address, "--device", "cpu", "--scale", scale])
        runpy.run_path(str(ROOT / "examples/mixed_precision/train.py"), run_name="__main__")
        found = re.findall(r"skipped (\d+) batches.*\naccuracy (\S+)", capsys.readouterr().out)
        assert found, "the script printed neither what it skipped nor its accuracy"
        skipped, accuracy = int(found[0][0]), float(found[0][1])
        assert (skipped > 0) == overflows
        assert live.core.complete
        assert live.core.ledger.samples_completed == SETTINGS.epochs * SAMPLES
        left_out = SETTINGS.epochs * SAMPLES - live.core.samples_committed
        assert 0 <= 64 * skipped - left_out <= 64 * skipped * 0.9, "only what was skipped was left out"
        assert (left_out > 0) == overflows
        assert accuracy > 0.8, "statistics of BatchNorm that do not fit θ would ruin the model"
