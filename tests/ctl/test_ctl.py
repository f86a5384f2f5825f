"""gem-ctl against a real server."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from click.testing import CliRunner, Result
from gem_api.errors import ServerUnavailable
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.message_json import as_dict
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, Session, connect
from gem_ctl import text
from gem_ctl.cli import main
from gem_ctl.local_runs import Announcement, find_runs
from gem_ctl.target import Target
from kit.model import GRADIENT, in_background, model, theta, version
from kit.server import DEADLINE, Live, config, serving
from kit.settings import configured
from kit.tokens import ADMIN, LINES, write_tokens

NOBODY = "127.0.0.1:1"


def ctl(*arguments: str, **environment: str) -> Result:
    """Runs gem-ctl in this process."""
    return CliRunner().invoke(main, arguments, env={"GEM_SERVER": None, "GEM_TIMEOUT": None, **environment})


def on(live: Live, *arguments: str, **environment: str) -> Result:
    return ctl("--server", live.address, *arguments, **environment)


def as_json(result: Result) -> dict[str, Any]:
    """The one JSON object on standard output, by the letter of the standard."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout, parse_constant=refuse)
    return parsed


# -- options


@pytest.mark.parametrize("command", [["status", "--json"], ["health"], ["quarantine", "list"]])
def test_the_options_of_the_connection_may_follow_the_command(command: list[str], live: Live, tmp_path: Path) -> None:
    before = ctl("--server", live.address, "--runs", str(tmp_path), *command)
    after = ctl(*command, f"--server={live.address}", "--runs", str(tmp_path))
    assert (before.exit_code, after.exit_code) == (0, 0), after.output
    assert after.stdout.splitlines()[:2] == before.stdout.splitlines()[:2]
    wrong = ctl(command[0], "--server", NOBODY, *command[1:])
    assert (wrong.exit_code, NOBODY in wrong.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "--server"], "Option '--server' requires an argument"),
        (["status", "--serve", "h"], "No such option '--serve'"),
        (["pull", "--", "--server"], "no server at"),
        (["checkpoint", "--to", "--server"], "no server at"),
    ],
)
def test_what_is_no_option_of_the_connection_stays_where_it_is(arguments: list[str], said: str) -> None:
    result = ctl(*arguments, GEM_SERVER=NOBODY)
    assert result.exit_code
    assert said in result.stderr


# -- status


def test_the_command_asks_the_terminal_how_wide_it_is(live: Live, session: Session) -> None:
    wide, narrow = (on(live, "status", COLUMNS=columns).stdout for columns in ("100", "60"))
    assert "shards" in wide.partition("worker ")[2]
    assert "shards" not in narrow.partition("worker ")[2]


def test_status_shows_the_run_at_a_glance(live: Live, session: Session) -> None:
    result = on(live, "status")
    assert result.exit_code == 0
    lines = dict(re.split(r"\s+", line, maxsplit=1) for line in result.stdout.splitlines() if line)
    assert lines["run"].startswith(f"{live.core.run_id}, training")
    assert lines["rule"] == "gem, learning rate 0.05, momentum 0.9, batch 64"
    assert lines["version"].startswith("1 (1 applied")
    assert lines["model"].startswith("9 parameters")
    assert lines["loss"] == "1.2500"
    assert lines["leases"] == "1 live; ended: none"
    assert lines["alice"].split()[:2] == ["1", "0"]


def test_status_says_how_commits_travel(live: Live) -> None:
    with connect(live.address, name="alice") as session:
        session.join(model())
        before = on(live, "status").stdout
        session.commit(GRADIENT)
        text = on(live, "status").stdout
    assert re.search(r"^commits via –$", before, re.MULTILINE)
    assert re.search(r"^commits via 1 tcp$", text, re.MULTILINE)
    assert re.search(r"^alice .* tcp +\d+ s$", text, re.MULTILINE)


def names_of(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_json_status_has_every_field_of_the_contract_and_numbers_are_numbers(live: Live) -> None:
    """Names stay text even if they are all digits; a loss that is not a number is null."""
    status = as_json(on(live, "status", "--json"))
    assert status.keys() == names_of(pb.GetStatusResponse)
    assert (status["state"], status["workers"]) == ("RUN_STATE_WAITING", [])
    assert {status[absent] for absent in ("training_loss", "pi_median", "evaluation", "checkpoint_version")} == {None}
    live.on_loop(lambda: setattr(live.core, "run_id", "12345678"))
    with connect(live.address, name="007") as session, Admin(live.address) as admin:
        session.join(model())
        for loss in (float("nan"), float("inf"), 1.25):
            session.commit(GRADIENT, loss=loss)
            status = as_json(on(live, "status", "--json"))
        admin.report_evaluation(1, 0.5)
        assert as_json(on(live, "status", "--json"))["evaluation"] == {"version": 1, "loss": 0.5, "accuracy": None}
        admin.report_evaluation(1, 0.5, 0.75)
        assert as_json(on(live, "status", "--json"))["evaluation"]["accuracy"] == 0.75
        assert "accuracy 75.00 %" in on(live, "status").stdout
    worker = status["workers"][0]
    assert status["hyperparameters"].keys() == names_of(pb.Hyperparameters)
    assert status["shards"].keys() == names_of(pb.ShardStatus)
    assert worker.keys() == names_of(pb.WorkerStatus)
    assert (status["run_id"], worker["name"], worker["loss"]) == ("12345678", "007", 1.25)
    assert (status["version"], status["state"], status["parameter_count"]) == (3, "RUN_STATE_TRAINING", 9)
    assert {type(status[name]) for name in ("version", "parameter_count", "memory_bytes", "queue_length")} == {int}
    floats = ("staleness", "uptime_seconds", "checkpoint_age_seconds", "pi_median")
    assert {type(status[name]) for name in floats} == {type(status["hyperparameters"]["learning_rate"])} == {float}
    assert (type(worker["commits"]), status["commits"]["applied"]) == (int, 3)


# -- pull


def test_pull_writes_the_model_by_its_own_names(live: Live, session: Session, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("what was there before")
    result = on(live, "pull", str(out))
    assert result.exit_code == 0, result.output
    assert "version 1" in result.stdout
    tensors = safetensors.numpy.load_file(out)
    assert {name: (value.shape, value.dtype.type) for name, value in tensors.items()} == {
        "w": ((2, 3), np.float32),
        "b": ((3,), np.float32),
    }
    np.testing.assert_array_equal(np.concatenate([tensors["w"].reshape(-1), tensors["b"]]), theta(live))
    with safetensors.safe_open(out, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "gem_version": "1"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert version(live) == 1
    assert session.commit(GRADIENT).staleness == 0, "it changes nothing in the run"


def test_pull_writes_the_average_that_the_run_keeps(live: Live, session: Session, tmp_path: Path) -> None:
    assert_one_line(on(live, "pull", "--average", str(tmp_path / "m")), "start its server with --average DECAY")
    with serving(config(Hyperparameters(average=0.5))) as keeping, connect(keeping.address) as other:
        other.join(model())
        other.commit(GRADIENT)
        result = on(keeping, "pull", "--average", str(tmp_path / "m"))
        assert "the average at version 1, 2 tensors, 9 parameters" in result.stdout
        tensors = safetensors.numpy.load_file(tmp_path / "m")
        kept = keeping.on_loop(lambda: keeping.core.central.average.copy())
        np.testing.assert_array_equal(np.concatenate([tensors["w"].reshape(-1), tensors["b"]]), kept)


def test_pull_before_there_is_a_model_fails_with_one_line(live: Live, tmp_path: Path) -> None:
    assert_one_line(on(live, "pull", str(tmp_path / "m")), "NotInitialized")
    assert list(tmp_path.iterdir()) == []


def test_pull_into_what_is_no_folder_fails_with_one_line(live: Live, session: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_one_line(on(live, "pull", str(tmp_path / "nowhere" / "m")), "nowhere")
    assert_one_line(on(live, "pull", str(tmp_path / "file" / "m")), "can't write")


def test_pull_writes_to_standard_output_where_no_file_can_be_written(live: Live, session: Session) -> None:
    result = on(live, "pull", "-")
    assert result.exit_code == 0
    assert set(safetensors.numpy.load(result.stdout_bytes)) == {"w", "b"}
    assert "version 1" in result.stderr


# -- checkpoint, drain


def test_checkpoint_says_where_it_is(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live, connect(live.address) as session:
        session.join(model())
        session.commit(GRADIENT)
        result = on(live, "checkpoint")
        assert result.exit_code == 0
        (written,) = tmp_path.glob("checkpoint-*")
        assert "version 1" in result.stdout
        assert str(written) in result.stdout
        assert (written / "model.safetensors").is_file()
        assert as_json(on(live, "status", "--json"))["checkpoint_version"] == 1


def test_checkpoint_on_a_server_without_a_folder_fails_with_one_line(live: Live, session: Session) -> None:
    assert_one_line(on(live, "checkpoint"), "CheckpointFailed")


def test_the_history_holds_every_commit_that_a_checkpoint_holds(tmp_path: Path) -> None:
    history = tmp_path / "commits.csv"
    with serving(config(checkpoint_dir=tmp_path / "checkpoints", history=history)) as live, connect(live.address) as session:
        session.join(model())
        for _ in range(3):
            session.commit(GRADIENT)
        assert on(live, "checkpoint").exit_code == 0
        versions = [line.split(",")[0] for line in history.read_text().splitlines()]
        assert versions == ["version", "1", "2", "3"]


def test_drain_ends_the_server_with_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live:
        session = connect(live.address)
        session.join(model())
        session.commit(GRADIENT)
        result = on(live, "drain")
        assert result.exit_code == 0
        assert "shutting down" in result.stdout
        live.stop()
        with serving(replace(live.config, listen=live.address, resume=True)) as back, session:
            assert version(back) == 1
            assert session.commit(GRADIENT).version == 2


# -- what goes wrong


def assert_one_line(result: Result, text: str) -> None:
    """Exit status 1, and one line on standard error that holds `text`."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert text in line


@pytest.mark.parametrize("arguments", [["status"], ["status", "--watch"], ["pull", "m"], ["checkpoint"]], ids=" ".join)
def test_an_unreachable_server_is_one_line(arguments: list[str]) -> None:
    assert_one_line(ctl("--server", NOBODY, *arguments), f"gem-ctl: no server at {NOBODY} (is gem-server running?)")


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_to_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "gem_ctl", "plan", "--parameters", "1M"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=DEADLINE)
    assert result.returncode == 1
    assert result.stderr.splitlines() == ["gem-ctl: can't write: No space left on device"]


def test_pull_gives_up_on_a_server_that_never_answers(tmp_path: Path) -> None:
    """It accepts the connection, and says nothing. The SDK's own limit is 60 seconds."""
    given: dict[str, Any] = {}

    def connect(address: str, **options: Any) -> Any:
        given.update(options)
        raise ServerUnavailable("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gem_ctl.cli.connect", connect)
        ctl("--server", NOBODY, configured(timeout=0.5), "pull", str(tmp_path / "m"))
    assert given["timeout"] == 0.5
    assert given["retry"].give_up_after == 0, "if nobody is there, it says so as soon as the other commands"


@pytest.mark.parametrize(
    "arguments", [["status", "--jsn"], ["--sever", "a:1", "status"], ["pull"], ["stop"], ["status", "extra"]], ids=" ".join
)
def test_a_wrong_command_line_is_exit_status_2(arguments: list[str]) -> None:
    result = ctl(*arguments)
    assert result.exit_code == 2
    assert "Error" in result.stderr


# -- runs of gem-train on this machine


def test_the_one_local_run_is_found_and_named(live: Live, session: Session, tmp_path: Path) -> None:
    for name in ("run", "killed"):
        (tmp_path / name).mkdir()
    (tmp_path / "killed" / "server.address").write_text(f"{NOBODY}\n")  # what a gem-train that was killed leaves
    announcement = Announcement(tmp_path / "run", live.address)
    found = ctl("--runs", str(tmp_path), "status", "--json")
    assert as_json(found)["version"] == 1
    assert found.stderr == f"gem-ctl: {tmp_path / 'run'}, server {live.address}\n"
    announcement.close()
    assert find_runs(tmp_path) == {}


def test_the_token_of_a_local_run_is_found_with_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with serving(config(tokens=write_tokens(tmp_path / "tokens", *LINES))) as server:
        announcement = Announcement(tmp_path / "run", server.address)
        try:
            assert "token" in ctl("--runs", str(tmp_path), "status").stderr.splitlines()[-1]
            write_tokens(tmp_path / "run" / "admin-token", ADMIN)
            assert as_json(ctl("--runs", str(tmp_path), "status", "--json"))["version"] == 0
            mine = write_tokens(tmp_path / "mine", "x" * 16)
            wrong = ctl("--runs", str(tmp_path), "--token-file", str(mine), "status")
            assert wrong.exit_code == 1, "the token that the user names is used, if it is wrong too"
        finally:
            announcement.close()


def test_of_several_local_runs_none_is_asked_and_all_are_listed(tmp_path: Path) -> None:
    folders = {tmp_path / name: f"127.0.0.1:{port}" for port, name in enumerate("ab", start=1)}
    for folder in folders:
        folder.mkdir()
    announcements = [Announcement(folder, address) for folder, address in folders.items()]
    done = ctl("--runs", str(tmp_path), "drain")
    assert done.exit_code == 2
    assert all(f"--server {address}   {folder}" in done.stderr for folder, address in folders.items())
    for announcement in announcements:
        announcement.close()


def test_a_file_that_leads_to_another_machine_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here, there = Announcement(tmp_path / "here", "127.0.0.1:50052"), Announcement(tmp_path / "there", "elsewhere:50051")
    assert find_runs(tmp_path) == {tmp_path / "here": "127.0.0.1:50052"}
    here.close()
    there.close()


def test_without_a_local_run_the_default_port_is_asked(tmp_path: Path) -> None:
    assert Target(None, tmp_path, 1.0, {}).server == "127.0.0.1:50051"


# -- environment


def test_a_flag_wins_over_the_environment(live: Live, session: Session) -> None:
    assert as_json(ctl("status", "--json", GEM_SERVER=live.address))["version"] == 1
    assert as_json(ctl("--server", live.address, "status", "--json", GEM_SERVER=NOBODY))["version"] == 1


# -- what others send, and what others install


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300])
def test_a_status_with_odd_numbers_is_shown(number: float) -> None:
    odd = pb.GetStatusResponse(uptime_seconds=number, checkpoint_version=1, checkpoint_age_seconds=number, staleness=number)
    odd.hyperparameters.CopyFrom(Hyperparameters().to_message())
    odd.workers.add(name="w", lease_remaining_seconds=number)
    assert "\ncheckpoint  version 1, " in text.status(odd)
    assert as_dict(odd)["uptime_seconds"] == (number if math.isfinite(number) else None)


def test_a_state_of_a_newer_server_is_shown_by_its_number() -> None:
    newer = pb.GetStatusResponse()
    newer.ParseFromString(b"\x10\x63")  # the second field: 99
    assert text.state(newer) == "state 99"
    assert as_dict(newer)["state"] == "99"


def test_a_command_that_cannot_be_loaded_is_named_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(entry: EntryPoint) -> Any:
        raise RuntimeError("cannot cache function 'gem': no locator available for file 'kernel.py'")

    monkeypatch.setattr(EntryPoint, "load", load)
    helped = ctl("--help")
    assert helped.exit_code == 0
    assert "Can't be loaded: RuntimeError." in helped.stdout
    for arguments in (["reshard", "--help"], ["log", "verify", "folder"]):
        result = ctl(*arguments)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert f"can't load the command {arguments[0]}: RuntimeError: cannot cache" in line


def test_a_pipe_in_place_of_an_address_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "server.address")
    assert in_background(lambda: find_runs(tmp_path)).result(DEADLINE) == {}
