"""The page's steps back to an earlier checkpoint, done as written."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from gem_client import Admin, connect
from kit.model import GRADIENT, PLAIN, Array, model, theta, version
from kit.server import config, serving

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def move_aside(folder: Path, newer: str, log: bool) -> None:
    """Runs the page's commands in this folder, for these checkpoints, with the log or without it."""
    (commands,) = re.findall(r"^      mkdir /checkpoints/aside\n      mv /checkpoints/checkpoint-\S+ .*$", PAGE, re.MULTILINE)
    commands = re.sub(r"checkpoint-\d+-\*", newer, commands)
    commands = (commands if log else commands.replace(" /checkpoints/log", "")).replace("/checkpoints", str(folder))
    subprocess.run(["sh", "-ec", commands], check=True)


def resumed(folder: Path, durability: str, log: bool) -> tuple[int, Array, Array]:
    """A run of two commits, with a checkpoint after the first, is taken back to that one by the page's commands, with the
    log or without it. Returns its version then, its θ, and the θ of the checkpoint."""
    begun = config(PLAIN, checkpoint_dir=folder, durability=durability)
    with serving(begun) as live, connect(live.address) as session, Admin(live.address) as admin:
        session.join(model())
        session.commit(GRADIENT)
        admin.checkpoint()
        good = theta(live)
        session.commit(GRADIENT)
    assert (folder / "log").is_dir() == (durability == "log")
    move_aside(folder, "checkpoint-000000000002-*", log)
    with serving(replace(begun, resume=True)) as live:
        return version(live), theta(live), good


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_run_goes_back_to_an_earlier_checkpoint(durability: str, tmp_path: Path) -> None:
    at, found, good = resumed(tmp_path, durability, log=durability == "log")
    assert at == 1
    assert (found == good).all()


def test_with_the_log_in_place_the_server_would_come_back_as_it_was(tmp_path: Path) -> None:
    assert resumed(tmp_path, "log", log=False)[0] == 2
