"""gem-train with other optimizers than SGD: one on the server, and one that the task brings."""

from __future__ import annotations

from pathlib import Path

import pytest
from gem_client import Admin
from launcher.train_helpers import TRAINING_SAMPLES, Launch, last_state, read_json, settled_accuracy

pytestmark = pytest.mark.long

ADAMW = ("--optimizer", "adamw:beta2=0.99", "--learning-rate", "0.001")

OWN_TASK = """
import torch
from gem_worker.tasks.digits import Digits


class WithAdam(Digits):
    def optimizer(self, model):
        return torch.optim.NAdam(model.parameters(), lr=0.001)
"""


def test_adamw_on_the_server_learns_though_the_server_is_killed(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--epochs", "25", "--durability", "log", *ADAMW)
    launcher.until_version(30)
    with Admin(launcher.address) as admin:
        settings = admin.status().hyperparameters
        assert (settings.optimizer, settings.optimizer_options) == ("adamw", "beta2=0.99")
        assert (settings.kappa, settings.pi_max, settings.weight_decay) == (1.5, 1.0, 0.01)
    launcher.kill_member("gem_server")
    launcher.until_it_says("server was killed by SIGKILL; restarting it")
    assert launcher.wait() == 0, launcher.output
    state = last_state(launcher.folder)
    assert state["ledger"]["samples_completed"] == 25 * TRAINING_SAMPLES
    assert state["hyperparameters"]["optimizer"] == "adamw"
    assert settled_accuracy(launcher.folder) >= 0.9


@pytest.mark.parametrize("given", [(), ("--optimizer", "sgd")], ids=["its own", "sgd, as the user says"])
def test_a_task_brings_its_optimizer_unless_the_user_names_another(
    launch: Launch, tmp_path: Path, given: tuple[str, ...]
) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    launcher = launch("--workers", "2", "--task", "own_task:WithAdam", "--epochs", "20", *given, path=tmp_path)
    assert launcher.wait() == 0, launcher.output
    state = last_state(launcher.folder)
    assert state["hyperparameters"]["optimizer"] == (given[1] if given else "worker")
    assert read_json(launcher.folder / "run.json")["optimizer"] == state["hyperparameters"]["optimizer"]
    assert settled_accuracy(launcher.folder) >= 0.9
