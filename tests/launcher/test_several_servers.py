"""gem-train with several servers: each holds a part of the model, and any of them may die or stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
from click.testing import CliRunner
from gem_client import Admin
from gem_ctl.cli import main as gem_ctl
from gem_ctl.local_runs import find_runs
from launcher.train_helpers import (
    Launch,
    assert_every_sample_accounted_for,
    assert_ledger_complete,
    last_state,
    read_json,
    settled_accuracy,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
COMMITS = 23  # of batches of 64, per epoch


def versions(run: Path, servers: int) -> set[int]:
    """The versions of the servers' newest checkpoints."""
    return {last_state(run, f"range-{index}")["version"] for index in range(servers)}


def test_three_servers_train_one_model(launch: Launch) -> None:
    launcher = launch("--servers", "3", "--workers", "2", "--epochs", "20")
    assert launcher.wait() == 0, launcher.output
    assert "2 workers, 3 servers, rule gem" in launcher.output
    assert len(launcher.addresses) == 3
    run = launcher.folder
    assert_every_sample_accounted_for(run, 20, "range-0")
    assert versions(run, 3) == {20 * COMMITS}
    summary = read_json(run / "summary.json")
    assert (summary["outcome"], summary["commits"], summary["servers"]) == ("complete", 20 * COMMITS, 3)
    assert settled_accuracy(run) >= 0.9
    assert summary["commits_via"] == {"memory": 2}
    assert {log.name for log in (run / "logs").glob("server*")} == {f"server-{index}.log" for index in range(3)}
    logged = [line for log in (run / "logs").iterdir() for line in log.read_text().splitlines()]
    # What a busy machine makes workers say, and no failure.
    busy = ("(is gem-server running?); trying again", "the server answers again", "the server was suspended")
    assert not [line for line in logged if "warning" in line and not any(each in line for each in busy)]
    assert "trying again" not in launcher.output
    assert launcher.members() == {}
    model = safetensors.numpy.load_file(run / "model.safetensors")
    with safetensors.safe_open(run / "model.safetensors", framework="numpy") as file:
        assert {int(file.metadata()["gem_version"])} == versions(run, 3)
    assert sum(value.size for value in model.values()) == 163_790
    newest = [max((run / "checkpoints" / f"range-{index}").glob("checkpoint-*")) for index in range(3)]
    parts = [safetensors.numpy.load_file(path / "model.safetensors") for path in newest]
    whole = [(part[name], model[name]) for part in parts for name in part if name in model]
    assert len(whole) >= len(model) - 2, "tensors that no boundary cuts have their own names"
    assert all((mine == saved).all() for mine, saved in whole)


def test_each_server_is_killed_and_the_run_ends_complete_without_losing_a_commit(launch: Launch) -> None:
    launcher = launch("--servers", "2", "--workers", "2", "--epochs", "40")
    for index, version in ((1, 30), (0, 200)):
        reached = launcher.until_version(version)
        launcher.kill_member(f"--range={index}/2")
        launcher.until_it_says(f"server-{index} was killed by SIGKILL; restarting it")
        launcher.until_version(reached + 10)
    assert launcher.wait() == 0, launcher.output
    run = launcher.folder
    assert_ledger_complete(last_state(run, "range-0"), 40)  # the history lacks what the killed leader had not yet written to it
    assert versions(run, 2) == {40 * COMMITS}
    assert settled_accuracy(run) >= 0.9
    assert launcher.members() == {}


def test_ctrl_c_stops_all_servers_and_the_run_can_be_resumed(launch: Launch) -> None:
    launcher = launch("--servers", "2", "--workers", "2", "--until-stopped", background=True)
    launcher.until_version(30)
    assert len(launcher.members()) == 4
    assert find_runs(launcher.folder.parent) == {launcher.folder: launcher.addresses[0]}, "as gem-ctl finds the lead"
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, launcher.output
    assert "the 2 servers write checkpoints" in launcher.output
    assert launcher.members() == {}
    run = launcher.folder
    (stopped,) = versions(run, 2)
    assert stopped >= 30

    resumed = launch("--resume", str(run), "--epochs", "20")
    with Admin(resumed.address) as admin:
        resumed.until_version(stopped + 1)
        assert admin.status().range_count == 2
    assert resumed.wait() == 0, resumed.output
    assert_every_sample_accounted_for(run, 20, "range-0")
    assert len(versions(run, 2)) == 1


def test_a_run_of_one_server_goes_on_with_two_after_reshard(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--epochs", "3")
    assert launcher.wait() == 0, launcher.output
    run, alone = launcher.folder, launcher.folder / "alone"
    (run / "checkpoints").rename(alone)
    reshard = CliRunner().invoke(gem_ctl, ["reshard", str(alone), str(run / "checkpoints"), "--ranges", "2"])
    assert reshard.exit_code == 0, reshard.output

    resumed = launch("--resume", str(run), "--epochs", "6")
    assert resumed.wait() == 0, resumed.output
    assert_every_sample_accounted_for(run, 6, "range-0")
    assert versions(run, 2) == {6 * COMMITS}
    assert [read_json(run / "run.json")[name] for name in ("servers", "durability")] == [2, "log"]
