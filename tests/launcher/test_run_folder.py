"""The folder of a run that the user names: the same command begins a run in it and goes on with it."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_ctl.output import replace
from gem_worker.launcher import run_folder, scorer
from gem_worker.launcher.cli import main as train
from gem_worker.launcher.launch import _folder, _refuse
from gem_worker.launcher.options import run_options
from gem_worker.launcher.run_folder import RunFolder
from safetensors import SafetensorError
from safetensors.numpy import load_file


def options_of(*arguments: str) -> dict[str, Any]:
    return run_options(train.make_context("gem-train", list(arguments)))[0]


@pytest.mark.parametrize("left", [[], ["lost+found/"], [".run.json"]], ids=str)
def test_the_same_command_begins_a_run_in_an_empty_folder_and_resumes_it(left: list[str], tmp_path: Path) -> None:
    """A new file system has `lost+found`; a process that is killed while it begins a run may leave `.run.json`."""
    for name in left:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("{")
    command = ("--resume", str(tmp_path), "--epochs", "3", "--workers", "2", "--durability", "log")
    begun = options_of(*command)
    assert begun["resume"] is None
    assert _folder(begun).path == tmp_path
    assert json.loads((tmp_path / "run.json").read_text()).keys().isdisjoint({"folder"})
    resumed = options_of(*command, "--workers", "5")
    assert (resumed["resume"], resumed["epochs"], resumed["workers"]) == (tmp_path, 3, 5)


def test_a_run_that_can_not_start_leaves_the_users_folder_empty(tmp_path: Path) -> None:
    folder = _folder(options_of("--resume", str(tmp_path)))
    assert _refuse(folder, ValueError("no"), False, print) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_while_it_saves_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.begin(tmp_path, {"epochs": 3})

    def killed(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.save_options({"epochs": 4})
    assert json.loads(folder.options.read_text())["epochs"] == 3


def full(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Has the disk of these folders be full."""

    def refuse(path: Path, write: Callable[[Path], object]) -> None:
        if any(folder in path.parents for folder in folders):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        replace(path, write)

    monkeypatch.setattr(run_folder, "replace", refuse)


def save(folder: RunFolder) -> None:
    folder.save_model(Layout.of({"weight": (2,)}), np.ones(2, np.float32), 7)
    folder.save_summary({"commits": 7})


def test_results_that_the_folder_has_no_room_for_are_saved_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    full(monkeypatch, folder.path)
    save(folder)
    (elsewhere,) = tmp_path.glob("gem-run-*")
    assert folder.results == {name: elsewhere / name for name in ("model.safetensors", "summary.json")}
    assert load_file(elsewhere / "model.safetensors")["weight"].tolist() == [1, 1]
    assert json.loads((elsewhere / "summary.json").read_text()) == {"commits": 7}
    assert folder.misplaced == (
        f"can't write to {folder.path}: No space left on device; model.safetensors and summary.json are in {elsewhere}"
    )


def test_results_that_have_no_room_anywhere_are_said_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    full(monkeypatch, tmp_path)
    save(folder)
    assert folder.misplaced is not None
    assert folder.misplaced.endswith("; there is no room elsewhere for model.safetensors and summary.json")
    assert list(tmp_path.glob("**/*.*")) == []


def test_a_model_that_can_not_be_written_leaves_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    save(folder)
    before = folder.model.read_bytes()

    def cut(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(before[:10])
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(run_folder, "save_file", cut)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    save(folder)
    assert folder.model.read_bytes() == before
    assert folder.results["model.safetensors"] is None
    assert folder.misplaced is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "summary.json"]


@pytest.mark.parametrize("left", ["", "[{", "{}", "[1]", '[{"version": 1}]', "null"])
def test_a_run_goes_on_without_evaluations_that_are_damaged(
    left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.evaluations.write_text(left)
    assert scorer._earlier_scores(folder) == []
    assert ("are left out" in capsys.readouterr().out) is (left != "{}")


def test_two_runs_that_begin_at_once_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as both see it
    monkeypatch.setattr("time.strftime", lambda form: "now")
    one, other = (RunFolder.create(tmp_path / "runs", "digits", {}) for _ in range(2))
    assert (one.path.name, other.path.name) == ("now-digits", "now-digits-1")
