"""The paper's figures as users make them: an experiment with a real server and real workers is drawn, and not run twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.server import wait_until

from benchmarks.lib.launch import RunFailed
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.runner import Runner

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
TINY = Experiment("digits", workers=2, steps=20)
PATIENCE = 180.0


def paper(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.paper", *arguments]


def test_an_experiment_runs_for_real_and_is_kept(tmp_path: Path) -> None:
    runner = Runner(tmp_path, None, 2)
    assert runner.make(TINY).startswith("complete, test accuracy ")
    result = runner.result(TINY)
    assert result is not None
    assert result.curves["version"].tolist() == list(range(1, 41))
    assert (result.steps[-1], result.settings["steps"], result.settings["rule"]) == (20, 20, "gem")
    assert 2.2 < result.curves["loss"][0] < 2.4
    assert result.curves["loss"][-10:].mean() < result.curves["loss"][:10].mean()
    assert result.test_accuracy is not None
    assert 0.1 < result.test_accuracy <= 1


@pytest.mark.slow
def test_workers_that_come_and_go_are_a_run_too(tmp_path: Path) -> None:
    churn, runner = Experiment("digits", workers=2, steps=60, setting="staged", replacements=1), Runner(tmp_path, None, 2)
    assert runner.make(churn).startswith("complete")
    result = runner.result(churn)
    assert result is not None
    assert result.curves["version"][-1] >= 120


def test_an_experiment_that_can_not_start_says_why(tmp_path: Path) -> None:
    wrong = Experiment("digits", rule="no-such-rule", workers=2, steps=5)
    with pytest.raises(RunFailed, match="no-such-rule"):
        Runner(tmp_path, tmp_path, 2).make(wrong)


# As a script starts a command that ends in "&": with SIGINT ignored.
IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]


@pytest.mark.slow
def test_when_it_is_ended_it_leaves_no_process_and_a_page_that_tells_what_is_missing(tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output.txt"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*IN_BACKGROUND, *paper("3", "--quick", "--out", str(out))],
            cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: list(tmp_path.glob("gem-paper-*/runs/*/commits.csv")), "commits", PATIENCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert "stopped" in output.read_text()
    assert "Not run yet: `python -m benchmarks.paper 3" in (out / "README.md").read_text()
    assert not [line for line in command_lines() if str(tmp_path) in line]


def command_lines() -> list[str]:
    """Of all processes of this machine."""
    return [
        entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if entry.exists()
    ]
