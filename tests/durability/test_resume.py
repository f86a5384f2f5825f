"""What a resuming server reports about hyper-parameters that this start changes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gem_api.checkpoint import digest
from gem_api.hyperparameters import Hyperparameters
from gem_server.config import StartError
from gem_server.durability.log_cli import main as log
from gem_server.durability.resume import Beginning, lock_directory, make_core
from gem_server.durability.state import require_hyperparameters
from gem_server.wiring import new_progress
from kit.core import commit, save_core, start
from kit.core import make_core as new_core
from kit.server import config
from structlog.testing import CapturingLogger

KEPT = Hyperparameters(epochs=1200, learning_rate=0.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run of 1,200 epochs."""
    core = new_core(KEPT)
    (ann,) = start(core)
    commit(core, ann, 1, 1.0)
    save_core(core, tmp_path)
    return tmp_path


def test_a_resumed_run_knows_when_its_checkpoint_was_written(saved: Path) -> None:
    (state,) = saved.glob("checkpoint-*/state.json")
    os.utime(state, (5e8, 1e9))
    beginning, _ = begun(saved, KEPT, set())
    progress = new_progress(beginning.core, 100.0, 1e9 + 4000.0, beginning.written)
    assert (progress.checkpoint_version, progress.checkpoint_at) == (1, 100.0 - 4000.0), "its age is not that of the restart"


def resumed(folder: Path, asked: Hyperparameters, given: set[str]) -> dict[str, str]:
    """What a server warns of when it resumes with these settings, `given` naming those that the user stated."""
    return begun(folder, asked, given)[1]


def begun(folder: Path, asked: Hyperparameters, given: set[str]) -> tuple[Beginning, dict[str, str]]:
    logger = CapturingLogger()
    wanted = replace(config(asked, checkpoint_dir=folder, resume=True), given=frozenset(given))
    beginning = make_core(wanted, lambda: 0.0, logger)
    warned = [call for call in logger.calls if call.method_name == "warning"]
    lost, *warned = warned
    assert "no log was kept: commits after this checkpoint" in lost.args[0], "it was not the last of its start"
    assert len(warned) <= 1
    return beginning, warned[0].kwargs if warned else {}


@pytest.mark.parametrize(
    ("change", "outdated"),
    [
        ({"epochs": 160}, False),
        ({"kappa": 2.0}, False),
        ({"steps": 5}, True),
        ({"schedule": "cosine", "decay_versions": 9}, True),
    ],
)
def test_workers_that_use_a_changed_setting_are_outdated(change: dict[str, Any], outdated: bool, saved: Path) -> None:
    beginning, _ = begun(saved, replace(KEPT, **change), set(change))
    assert beginning.outdated is outdated


def test_a_changed_setting_is_named_with_both_values(saved: Path) -> None:
    assert resumed(saved, replace(KEPT, epochs=160), {"epochs", "learning_rate"}) == {"epochs": "1200 -> 160"}


def test_nothing_is_said_where_nothing_is_changed(saved: Path) -> None:
    assert resumed(saved, KEPT, {"epochs"}) == {}
    assert resumed(saved, Hyperparameters(), set()) == {}


def test_an_average_may_be_begun_at_a_resume_and_counts_in_its_memory(saved: Path) -> None:
    beginning, warned = begun(saved, replace(KEPT, average=0.9), {"average"})
    central = beginning.core.central
    assert (warned, beginning.outdated) == ({"average": "0.0 -> 0.9"}, False)
    np.testing.assert_array_equal(central.average, central.theta)
    limit = beginning.core.memory.held
    logger = CapturingLogger()
    asked = config(replace(KEPT, average=0.9), checkpoint_dir=saved, resume=True, given=frozenset({"average"}))
    make_core(replace(asked, memory_limit=limit), lambda: 0.0, logger)
    with pytest.raises(StartError, match=f"the run's workers hold {limit} bytes, but memory_limit is {limit - 1}"):
        make_core(replace(asked, memory_limit=limit - 1), lambda: 0.0, logger)


def test_a_checkpoint_and_a_record_from_before_there_were_averages_have_none(saved: Path) -> None:
    (path,) = saved.glob("checkpoint-*/state.json")
    values = json.loads(path.read_text())
    del values["hyperparameters"]["average"]
    path.write_text(json.dumps({**values, "sha256": digest(values)}))
    assert resumed(saved, replace(KEPT, average=0.9), {"average"}) == {"average": "0.0 -> 0.9"}
    require_hyperparameters(values["hyperparameters"], "BEGAN")
    with pytest.raises(ValueError, match="unknown name, 'average'"):
        require_hyperparameters({**vars(KEPT)}, "BEGAN", 1)


@pytest.mark.parametrize(("kept", "said"), [(0.0, "does not contain tensor /average"), (0.9, "unknown tensor, '/average'")])
def test_a_checkpoint_has_the_array_if_and_only_if_its_run_keeps_one(kept: float, said: str, tmp_path: Path) -> None:
    core = new_core(replace(KEPT, average=kept))
    start(core)
    path = save_core(core, tmp_path) / "state.json"
    values = json.loads(path.read_text())
    values["hyperparameters"]["average"] = 0.9 - kept
    path.write_text(json.dumps({**values, "sha256": digest(values)}))
    with pytest.raises(StartError, match=said):
        resumed(tmp_path, KEPT, set())


def test_what_is_the_runs_for_good_is_refused(saved: Path) -> None:
    with pytest.raises(StartError, match="--batch-size was 64"):
        resumed(saved, replace(KEPT, batch_size=8), {"batch_size"})


def test_a_resumed_run_without_an_end_is_refused_as_a_new_one_is(saved: Path) -> None:
    with pytest.raises(StartError, match="would train forever"):
        resumed(saved, replace(KEPT, epochs=0), {"epochs"})
    assert resumed(saved, replace(KEPT, epochs=0, steps=5), {"epochs", "steps"}) == {"epochs": "1200 -> 0", "steps": "0 -> 5"}


def test_a_run_goes_on_until_it_is_stopped_if_the_user_says_so(saved: Path) -> None:
    endless = config(replace(KEPT, epochs=0), checkpoint_dir=saved, resume=True, until_stopped=True)
    core = make_core(replace(endless, given=frozenset({"epochs", "steps"})), lambda: 0.0, CapturingLogger()).core
    assert core.settings.endless
    save_core(core, saved)
    assert begun(saved, Hyperparameters(), set())[0].core.settings.endless, "what was asked for once holds for the run"
    assert not begun(saved, replace(KEPT, epochs=3), {"epochs"})[0].core.settings.endless


RULE = """
from dataclasses import dataclass
from gem_server.rules import ArrayRule

@dataclass(frozen=True)
class Own(ArrayRule):
    learning_rate: float = 0.1
    numbers = {"count": 0.0}

    def move(self, theta, update, buffers, rule_input):
        rule_input.shared.numbers["count"] += update.max()  # a NumPy scalar
        theta -= update
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose rule is a user's own, in a module that can't be imported any more."""
    (tmp_path / "own_rule.py").write_text(RULE)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        core = new_core(Hyperparameters(rule="own_rule:Own"))
        (ann,) = start(core)
        commit(core, ann, 1, 1.0)
        save_core(core, tmp_path / "run")
    del sys.modules["own_rule"]
    return tmp_path / "run"


def test_a_rule_that_cant_be_imported_leaves_the_checkpoints(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Hyperparameters(rule="own_rule:Own")
    before = sorted(path.name for path in own.iterdir())
    with pytest.raises(StartError, match="can't import 'own_rule'"):
        resumed(own, asked, {"rule"})
    assert sorted(path.name for path in own.iterdir()) == before
    monkeypatch.syspath_prepend(own.parent)
    beginning, _ = begun(own, asked, {"rule"})
    assert beginning.core.central.version == 1
    assert beginning.core.shared.numbers == {"count": 1.0}


def test_no_file_says_what_code_is_loaded(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own.parent)
    with pytest.raises(StartError, match="give --rule own_rule:Own to load its code"):
        resumed(own, Hyperparameters(), set())
    replayed = CliRunner().invoke(log, ["replay", str(own), "--out", str(own / "model")])
    assert "give --rule own_rule:Own" in replayed.stderr
    assert "own_rule" not in sys.modules
    assert CliRunner().invoke(log, ["replay", str(own), "--rule", "own_rule:Own", "--out", str(own / "model")]).exit_code == 0


def test_windows_of_more_shards_than_a_worker_may_hold_are_refused_at_start() -> None:
    fits = Hyperparameters(rule="diloco", batch_size=64, shard_size=128, local_steps=1996)
    new_core(fits)
    with pytest.raises(ValueError, match="raise shard_size, or use fewer local steps"):
        new_core(replace(fits, local_steps=1998))


@pytest.mark.parametrize(("batch_size", "shard_size"), [(64, 256), (100, 300), (512, 512)])
def test_a_new_runs_shards_hold_whole_batches(batch_size: int, shard_size: int, saved: Path) -> None:
    asked = Hyperparameters(batch_size=batch_size)
    assert make_core(config(asked), lambda: 0.0, CapturingLogger()).core.settings.shard_size == shard_size
    assert begun(saved, asked, set())[0].core.settings == KEPT


def test_shards_smaller_than_a_batch_are_refused() -> None:
    asked = replace(config(Hyperparameters(batch_size=512)), given=frozenset({"shard_size"}))
    with pytest.raises(StartError, match="shard_size 256 would cut batches of --batch-size 512 short"):
        make_core(asked, lambda: 0.0, CapturingLogger())


def test_workers_that_hold_more_than_the_memory_limit_are_not_taken_over(saved: Path) -> None:
    with pytest.raises(StartError, match="memory_limit is 1: raise the limit"):
        make_core(config(KEPT, checkpoint_dir=saved, resume=True, memory_limit=1), lambda: 0.0, CapturingLogger())


def test_a_checkpoint_folder_that_can_not_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"can't use .*/file for checkpoints: "):
        lock_directory(tmp_path / "file", CapturingLogger())


def test_a_folder_to_resume_from_that_does_not_exist_is_a_warning_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error in its name would begin another run unnoticed. An empty one is a cluster's first start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    logger = CapturingLogger()
    for name, resume in (("nothere", True), ("new", False), ("empty", True)):
        lock_directory(Path(name), logger, resume).close()
    ((level, (said,), values),) = logger.calls
    assert (level, said) == ("warning", "--resume finds no such folder: is its name right? A new run begins")
    assert values == {"checkpoint_dir": str(tmp_path / "nothere")}
