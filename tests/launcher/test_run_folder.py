"""The folder of a run that the user names: the same command begins a run in it and goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gem_worker.launcher.cli import main as train
from gem_worker.launcher.launch import _folder, _refuse
from gem_worker.launcher.options import run_options
from gem_worker.launcher.run_folder import RunFolder


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
