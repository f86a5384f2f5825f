"""gem-train used wrongly: exit status 2, one line that names what is wrong, no run left behind."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from gem_worker.launcher.cli import main
from gem_worker.launcher.launch import _folder
from kit.settings import configured
from launcher.train_helpers import Launch

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_what_the_server_itself_rejects_is_one_line_and_leaves_no_run_behind(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--workers", "1", "--batch-size", "32", configured(shard_size=8))
    assert launcher.wait() == 2, launcher.output
    assert launcher.output.splitlines()[-1].startswith("gem-train: shard_size 8 would cut batches")
    assert not list((tmp_path / "runs").iterdir())


def damaged_mnist(folder: Path) -> Path:
    """A folder whose first file is cut short."""
    folder.mkdir()
    content = struct.pack(">4I", 0x803, 60_000, 28, 28) + b"\0" * 100
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.mark.long
def test_mnist_without_its_folder_is_one_line_and_exit_status_2(launch: Launch) -> None:
    launcher = launch("--task", "mnist")
    assert launcher.wait() == 2
    (line,) = launcher.output.splitlines()
    assert line.startswith("gem-train: ")
    assert "--data" in line


def train(*arguments: str) -> tuple[int, str]:
    """Exit status and standard error of a gem-train that does not get as far as starting processes."""
    result = CliRunner().invoke(main, arguments)
    assert result.stdout == ""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def assert_refused(outcome: tuple[int, str], *words: str) -> None:
    """Exit status 2 and one line that holds the words."""
    status, said = outcome
    assert status == 2
    (line,) = said.splitlines()
    for word in ("gem-train: ", *words):
        assert word in line


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--rule", "gem:speed=9"), "the rule has no setting 'speed': its settings are momentum, "),
        (("--optimizer", "adamw:beta3=1"), "no setting 'beta3' (did you mean beta2?)"),
        (("--rule", "fedasync", "--optimizer", "adamw"), "rule fedasync can't apply --optimizer adamw"),
        (("--rule", "no_such_module:Rule"), "can't import 'no_such_module' for rule 'no_such_module:Rule'"),
        (("--rule", "json:loads"), "'json:loads' is not a rule"),
        (("--schedule", "cosine"), "--schedule cosine needs the number of commits"),
    ],
)
def test_what_the_server_rejects_of_the_rule_is_said_before_anything_starts(
    arguments: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    """Not even the task's data are read."""
    assert_refused(train("--task", "json:Missing", "--runs", str(tmp_path / "runs"), *arguments), why)
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_rule_of_the_current_folder_is_found_as_the_server_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check passes: what stops the run is its task."""
    rule = "from gem_server.rules.plain import Downpour\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\n"
    (tmp_path / "own_rule.py").write_text(rule + "class Own(Downpour):\n    speed: int = 1\n")
    monkeypatch.chdir(tmp_path)
    assert_refused(train("--task", "json:Missing", "--rule", "own_rule:Own:speed=9"), "no class 'Missing'")
    assert_refused(train("--task", "json:Missing", "--rule", "own_rule:Own:speed=x"), "speed is a whole number")


def test_damaged_data_is_named_and_leaves_no_run_behind(tmp_path: Path) -> None:
    data, runs = damaged_mnist(tmp_path / "mnist"), tmp_path / "runs"
    outcome = train("--task", "mnist", "--data", str(data), "--runs", str(runs))
    assert_refused(outcome, "train-images-idx3-ubyte.gz", "116 bytes")
    assert not runs.exists() or not list(runs.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "mnist", "--data", "/nowhere"], ["/nowhere"]),
        (["--task", "cifar"], ["'cifar': choose", "digits, mnist"]),
        (["--task", "digit"], ["'digit' (did you mean digits?)"]),
        (["--epochs", "0"], ["--epochs", "--steps"]),
        (["--servers", "40"], ["163790 parameters is too small for 40 servers", "at most 39"]),
    ],
)
def test_what_can_not_be_trained_is_refused(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    assert_refused(train(*arguments, "--runs", str(tmp_path / "runs")), *words)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--runs", "/dev/null/runs"], "runs"), (["--until-stopped", "--epochs", "5"], "--until-stopped contradicts --epochs 5")],
)
def test_what_can_not_begin_is_named(arguments: list[str], words: str) -> None:
    status, said = train(*arguments)
    assert (status, words in said) == (2, True)


@pytest.mark.parametrize(
    "content",
    [None, "[]", "[" * 100_000, '{"workers": "four"}', '{"servers": [2]}', '{"task": 1}', '{"workers": 0}', '{"overlap": 1}',
     '{"learning_rate": null}', '{"learning_rate": NaN}', '{"steps": true}', '{"data": {}}'],
)  # fmt: skip
def test_a_damaged_run_or_none_is_refused(content: str | None, tmp_path: Path) -> None:
    (tmp_path / ("notes.txt" if content is None else "run.json")).write_text(content or "")
    assert_refused(train("--resume", str(tmp_path)), str(tmp_path), "not the folder of a run")


def test_a_run_without_its_folder_of_logs_is_given_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert _folder({"resume": tmp_path}).logs.is_dir()


def test_a_resumed_run_says_what_it_keeps_and_why(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"rule": "gem", "task": "digits", "epochs": 3, "steps": 0}')
    kept = ("--rule", "can't change", "shards leased so far", "start a new run")
    assert_refused(train("--resume", str(tmp_path), "--rule", "downpour", "--learning-rate", "0.01"), *kept)
    assert_refused(train("--resume", str(tmp_path), "--task", "mnist"), "--task", "can't change")
    assert_refused(train("--resume", str(tmp_path), "--epochs", "0"), "would train forever", "--until-stopped")


def test_several_servers_need_the_log(tmp_path: Path) -> None:
    for durability in ("memory", "snapshot"):
        outcome = train("--servers", "2", "--durability", durability, "--runs", str(tmp_path / "runs"))
        assert_refused(outcome, "--servers 2 needs --durability log", durability)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("folders", "present", "wanted"), [(2, 2, 3), (2, 2, 1), (0, 1, 2)])
def test_a_resumed_run_with_another_number_of_servers_is_told_how(
    tmp_path: Path, folders: int, present: int, wanted: int
) -> None:
    (tmp_path / "run.json").write_text(f'{{"rule": "gem", "task": "digits", "epochs": 3, "steps": 0, "servers": {present}}}')
    (tmp_path / "checkpoints").mkdir()
    for index in range(folders):
        (tmp_path / "checkpoints" / f"range-{index}").mkdir()
    outcome = train("--resume", str(tmp_path), "--servers", str(wanted))
    command = f"gem-ctl reshard {tmp_path}/checkpoints FOLDER --ranges {wanted}"
    assert_refused(outcome, f"--servers {present}, not {wanted}", command)


@pytest.mark.parametrize(
    "arguments",
    [["--worker", "2"], ["--workers", "0"], ["--rule", "adam"], ["--resume", "no-such-folder"], ["digits"]],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_status_2_and_names_what_is_wrong(arguments: list[str]) -> None:
    status, said = train(*arguments)
    assert status == 2
    assert arguments[0] in said.splitlines()[-1]
