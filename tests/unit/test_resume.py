"""What a server that resumes says of settings that this start has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_server.config import StartError
from gem_server.resume import make_core
from live import config
from structlog.testing import CapturingLogger
from unit.helpers import commit, save_core, start
from unit.helpers import make_core as new_core

KEPT = Hyperparameters(epochs=1200, learning_rate=0.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run of 1,200 epochs."""
    core = new_core(KEPT)
    (ann,) = start(core)
    commit(core, ann, 1, 1.0)
    save_core(core, tmp_path)
    return tmp_path


def resumed(folder: Path, asked: Hyperparameters, given: set[str]) -> dict[str, str]:
    """What a server warns of when it resumes with these settings, `given` naming those that the user stated."""
    log = CapturingLogger()
    make_core(replace(config(asked, checkpoint_dir=folder, resume=True), given=frozenset(given)), lambda: 0.0, log)
    warned = [call.kwargs for call in log.calls if call.method_name == "warning"]
    assert len(warned) <= 1
    return warned[0] if warned else {}


def test_a_changed_setting_is_named_with_both_values(saved: Path) -> None:
    assert resumed(saved, replace(KEPT, epochs=160), {"epochs", "learning_rate"}) == {"epochs": "1200 -> 160"}


def test_nothing_is_said_where_nothing_is_changed(saved: Path) -> None:
    assert resumed(saved, KEPT, {"epochs"}) == {}
    assert resumed(saved, Hyperparameters(), set()) == {}


def test_what_is_the_runs_for_good_is_refused(saved: Path) -> None:
    with pytest.raises(StartError, match="--batch-size was 64"):
        resumed(saved, replace(KEPT, batch_size=8), {"batch_size"})
