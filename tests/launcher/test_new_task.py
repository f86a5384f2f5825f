"""gem-train --new: a task that runs as it is."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sized
from pathlib import Path

import pytest
from click.testing import CliRunner
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_client.torch import Optimizer, ShardSampler
from gem_worker.launcher.cli import main
from gem_worker.launcher.new_task import TEMPLATE
from gem_worker.tasks import load_task
from kit.pages import ROOT
from kit.server import config, serving
from launcher.train_helpers import Launch, read_json


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, new and empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    return tmp_path


def new(path: str) -> list[str]:
    """The lines that it prints. Fails if it does not succeed."""
    done = CliRunner().invoke(main, ["--new", path])
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_the_new_task_loads_by_the_name_that_is_printed_last_and_learns(folder: Path) -> None:
    program, flag, name, *_ = shlex.split(new("my_task.py")[-1])
    assert (program, flag) == ("gem-train", "--task")
    task = load_task(name, None)
    model, data, held_out = task.model(), task.training_data(), task.test_data()
    assert isinstance(data, Sized)
    assert isinstance(held_out, Sized)
    assert (len(data), len(held_out)) == (2048, 512)
    with serving(config(Hyperparameters(epochs=10, shard_size=256))) as live, connect(live.address) as session:
        optimizer = Optimizer(model.named_parameters(), session)
        for batch in ShardSampler(session, data).loader():
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step(loss=loss)
    assert loss.item() < 0.3
    assert task.correct(model, batch) is None


def test_a_file_that_exists_stays_as_it_is(folder: Path) -> None:
    (folder / "my_task.py").write_text("mine")
    done = CliRunner().invoke(main, ["--new", "my_task.py"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("gem-train: --new my_task.py: the file exists already")
    assert (folder / "my_task.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("my_task", "imports tasks as modules"),
        ("my-task.py", "imports tasks as modules"),
        ("class.py", "imports tasks as modules"),
        ("../my_task.py", "imports tasks as modules"),
        ("/my_task.py", "imports tasks as modules"),
        ("json.py", "would hide the installed module 'json'"),
        ("missing/my_task.py", "No such file or directory"),
    ],
)
def test_what_gem_train_could_not_import_is_refused_in_one_line(folder: Path, path: str, why: str) -> None:
    done = CliRunner().invoke(main, ["--new", path])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("gem-train: ")
    assert why in line
    assert not list(folder.iterdir())


def test_a_task_in_a_folder_below_has_its_name(folder: Path) -> None:
    (folder / "tasks").mkdir()
    assert "--task tasks.my_task:Sine" in new("tasks/my_task.py")[-1]
    assert (folder / "tasks/my_task.py").read_text() == TEMPLATE.read_text()


def test_the_example_of_a_worker_image_is_the_new_task() -> None:
    assert (ROOT / "deploy/custom-worker/sine.py").read_text() == TEMPLATE.read_text(), "gem-train --new writes it anew"


@pytest.mark.long
def test_gem_train_trains_the_new_task(folder: Path, launch: Launch) -> None:
    _, *arguments = shlex.split(new("my_task.py")[-1])
    launcher = launch(*arguments, "--workers", "2", path=folder)
    assert launcher.wait() == 0, launcher.output
    assert read_json(launcher.folder / "summary.json")["test_loss"] < 0.05
