"""gem-train with a task that fails: the run ends with a status and the user's own line."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from gem_worker.launcher.cli import main
from launcher.train_helpers import Launch, read_json

pytestmark = pytest.mark.timeout(900)

OWN_TASK = '''
"""Lines that fail in one way each."""
import sys

import torch
from kit.task import Line
from torch import nn
from torch.utils.data import TensorDataset


class Bad(Line):
    def loss(self, model, batch):
        return model(batch[0]).sum() * float("nan")


class Fails(Bad):
    def loss(self, model, batch):
        if not model.training:
            return model(batch[0]).sum()
        return self.criterion(model(batch[0]), batch[1])  # there is no criterion


class FailsInOneWorker(Bad):
    def loss(self, model, batch):
        if "--name=worker-1" in sys.argv:
            raise RuntimeError("no luck here")
        return model(batch[0]).sum()


class FailsInItsModel(Bad):
    def model(self):
        return nn.Linear(1, "one")


class HasNoTest(Bad):
    def test_data(self):
        return TensorDataset(torch.ones(0, 1), torch.ones(0, 1))
'''


@pytest.fixture(autouse=True)
def own_task(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)


@pytest.mark.long
def test_a_run_that_diverges_at_once_says_so_and_ends_with_status_3(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--workers", "1", "--task", "own_task:Bad", path=tmp_path)
    assert launcher.wait() == 3, launcher.output
    assert "worker-0 diverged" in launcher.output
    assert "Traceback" not in launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert (summary["outcome"], summary["commits"]) == ("diverged", 0)


@pytest.mark.long
def test_a_task_with_a_bug_ends_the_run_at_once_with_the_users_own_line(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--workers", "3", "--task", "own_task:Fails", path=tmp_path)
    assert launcher.wait() == 1, launcher.output
    message = launcher.output.partition("gem-train: ")[2].splitlines()
    assert message[0] == "every worker failed before its first commit:"
    assert message[1].startswith(f'  File "{tmp_path / "own_task.py"}", line ')
    assert message[2].strip() == "return self.criterion(model(batch[0]), batch[1])  # there is no criterion"
    assert "AttributeError: 'Fails' object has no attribute 'criterion'" in message
    assert Path(message[-1].removeprefix("full log: ")).parent == launcher.folder / "logs"
    assert launcher.output.count("restarting it") < 3
    assert launcher.members() == {}


@pytest.mark.long
@pytest.mark.slow
def test_a_bug_that_one_worker_alone_has_gets_its_restarts_and_the_run_a_report(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--workers", "2", "--task", "own_task:FailsInOneWorker", "--epochs", "1000000", path=tmp_path)
    launcher.until_it_says(r"(?s)(worker-1 ended with status 1; restarting it.*){2}")
    launcher.until_version(1)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 130, launcher.output
    assert read_json(launcher.folder / "summary.json")["outcome"] == "stopped"


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("FailsInItsModel", 'return nn.Linear(1, "one")'),
        ("HasNoTest", "the task's test_data() is empty"),
    ],
)
def test_a_task_that_fails_at_once_starts_no_run(task: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher tries the task on the first batch of its held-out data."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    runs = tmp_path / "runs"
    result = CliRunner().invoke(main, ["--workers", "1", "--task", f"own_task:{task}", "--runs", str(runs)])
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert "Traceback" not in result.output
    assert list(runs.iterdir()) == []
