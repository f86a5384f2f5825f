"""A user's own rule: the example of docs/rules.md in a real server process; and starts with invalid rules."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gem_api.errors import RuleFailed
from gem_api.hyperparameters import Hyperparameters
from gem_client import connect
from gem_server import apply_loop
from gem_server.durability import segment
from kit.pages import blocks
from kit.process import server_process
from kit.server import config, serving
from simulation.truth import fingerprint


def printed_rule() -> str:
    """The page's only block of Python with a class in it."""
    (text,) = (block.text for block in blocks(language="python", folder="docs/rules.md") if "class" in block.text)
    return text


@pytest.fixture
def importable(tmp_path: Path) -> dict[str, str]:
    """An environment in which my_rules can be imported, as if it were installed."""
    (tmp_path / "my_rules.py").write_text(printed_rule(), encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))}


def test_the_printed_rule_is_about_thirty_lines() -> None:
    assert len(printed_rule().splitlines()) <= 32


@pytest.mark.long
def test_the_printed_rule_trains(importable: dict[str, str], tmp_path: Path) -> None:
    """½‖θ‖² from ones: each gradient is θ, cut to a norm of 0.1, until that is more than what is left."""
    flags = ["--listen", "127.0.0.1:0", "--rule", "my_rules:Clipped:bound=0.1", "--learning-rate", "0.5"]
    with server_process(tmp_path, *flags, **importable) as server, connect(server.address, shared_memory=False) as session:
        theta = session.join({"w": np.ones(16, np.float32)})
        losses, expected = [], np.ones(16)
        for _ in range(120):
            losses.append(float(theta @ theta) / 2)
            expected -= 0.5 * expected * min(1.0, 0.1 / float(np.linalg.norm(expected)))
            theta = session.commit(theta.copy(), loss=losses[-1]).theta
            np.testing.assert_allclose(theta, expected, rtol=1e-4, atol=1e-6)
    assert losses[0] == 8.0
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-3


@pytest.mark.long
def test_a_start_with_a_wrong_rule_fails_with_one_line(importable: dict[str, str], tmp_path: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--rule", "my_rules:Clipped:bound=-1")
    with server_process(tmp_path, *flags, **importable) as server:
        assert server.wait() == 2
        (line,) = server.log.splitlines()
        assert line.startswith("gem-server: bound must be above 0")


RAISING = """
from dataclasses import dataclass
import numpy as np
from gem_server.rules import ArrayRule


@dataclass(frozen=True)
class Raising(ArrayRule):
    learning_rate: float = 0.5
    buffers = ("snapshot", "mine")
    shared = ("sum",)
    numbers = {"commits": 0.0}

    def move(self, theta, update, buffers, rule_input):
        rule_input.shared.buffers["sum"] += update
        rule_input.shared.numbers["commits"] += 1
        buffers["mine"] += update
        theta -= np.float32(self.learning_rate) * update
        if update[0] > 100:
            raise ZeroDivisionError("there is no norm")
"""


@pytest.mark.parametrize(("overlap", "inline"), [(False, 1 << 20), (True, 0)])
def test_nothing_is_left_of_a_commit_that_the_rule_raises_on(
    overlap: bool, inline: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule has written to all that it may write to when it raises. The log holds the commit, and a start replays it."""
    (tmp_path / "raising_rules.py").write_text(RAISING, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(segment, "_ALLOCATION", 1 << 16)
    monkeypatch.setattr(apply_loop, "INLINE_PARAMETERS", inline)  # at once, or in the thread
    settings = Hyperparameters(rule="raising_rules:Raising")
    logged = config(settings, checkpoint_dir=tmp_path / "run", durability="log")
    good, bad = np.ones(16, np.float32), np.full(16, 1000, np.float32)
    with serving(logged) as live, connect(live.address, shared_memory=False) as session:
        session.join({"w": np.ones(16, np.float32)}, overlap=overlap)
        session.commit(good)
        before = live.on_loop(lambda: fingerprint(live.core))
        with pytest.raises(RuleFailed, match=r"ZeroDivisionError: there is no norm \(raising_rules.py, line 20\)"):
            session.commit(bad)
        assert live.on_loop(lambda: fingerprint(live.core)) == before
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
        with serving(replace(logged, checkpoint_dir=tmp_path / "crashed", resume=True)) as back:
            assert back.on_loop(lambda: fingerprint(back.core)) == before
        assert session.commit(good).version == 2
        assert live.core.shared.numbers == {"commits": 2.0}
        after = live.on_loop(lambda: fingerprint(live.core))
        shutil.copytree(tmp_path / "run", tmp_path / "crashed-later")
    with serving(replace(logged, checkpoint_dir=tmp_path / "crashed-later", resume=True)) as back:
        assert back.on_loop(lambda: fingerprint(back.core)) == after
