"""The runbook's steps back to an earlier checkpoint, done as written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from gem_client import Admin, connect
from kit.model import GRADIENT, PLAIN, model, theta
from kit.server import config, serving

RUNBOOK = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text(encoding="utf-8")


def move_aside(folder: Path, newer: str, log: bool) -> None:
    """Runs the runbook's commands in this folder, for these checkpoints, with the log or without it."""
    (commands,) = re.findall(
        r"^      mkdir /checkpoints/aside\n      mv /checkpoints/checkpoint-\S+ .*$", RUNBOOK, re.MULTILINE
    )
    commands = re.sub(r"checkpoint-\d+-\*", newer, commands)
    commands = (commands if log else commands.replace(" /checkpoints/log", "")).replace("/checkpoints", str(folder))
    subprocess.run(["sh", "-ec", commands], check=True)


@pytest.mark.parametrize(("durability", "log"), [("snapshot", False), ("log", True)])
def test_a_run_goes_back_to_an_earlier_checkpoint(durability: str, log: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    begun = config(PLAIN, checkpoint_dir=folder, durability=durability)
    with serving(begun) as live, connect(live.address) as session, Admin(live.address) as admin:
        session.join(model())
        session.commit(GRADIENT)
        admin.checkpoint()
        good = theta(live)
        session.commit(GRADIENT)
    assert (folder / "log").is_dir() == log
    move_aside(folder, "checkpoint-000000000002-*", log)
    with serving(config(PLAIN, checkpoint_dir=folder, durability=durability, resume=True)) as live:
        assert live.on_loop(lambda: live.core.central.version) == 1
        assert (theta(live) == good).all()


def test_with_the_log_in_place_the_server_would_come_back_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    begun = config(PLAIN, checkpoint_dir=folder, durability="log")
    with serving(begun) as live, connect(live.address) as session, Admin(live.address) as admin:
        session.join(model())
        session.commit(GRADIENT)
        admin.checkpoint()
        session.commit(GRADIENT)
    move_aside(folder, "checkpoint-000000000002-*", log=False)
    with serving(config(PLAIN, checkpoint_dir=folder, durability="log", resume=True)) as live:
        assert live.on_loop(lambda: live.core.central.version) == 2
