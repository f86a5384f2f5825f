"""gem-train as users run it: real processes, killed and interrupted, down to the files that a run leaves."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
from click.testing import CliRunner
from gem_api.hyperparameters import Hyperparameters
from gem_client import Admin, GemError
from gem_client.ctl.local_runs import find_runs
from gem_server.telemetry.history import COLUMNS
from gem_worker.launcher.cli import main
from gem_worker.tasks.convnet import ConvNet
from gem_worker.tasks.idx import read_idx
from live import wait_until
from matplotlib import image

pytestmark = pytest.mark.timeout(900)
PATIENCE = 180.0  # seconds that a whole cluster may take to get anywhere on a busy machine
TRAINING_SAMPLES = 1438  # of the digits
SHARDS = 6  # of 256 samples, per epoch
MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist"
IN_BACKGROUND = [
    "sh",
    "-c",
    'trap "" INT; exec "$@"',
    "sh",
]  # as a script starts a command that ends in "&": with SIGINT ignored


class Launcher:
    """A running gem-train, its output in a file."""

    def __init__(
        self, folder: Path, *arguments: str, runs: Path | None = None, path: Path | None = None, background: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        self._runs = runs or folder / "runs"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path or ""), environment.get("PYTHONPATH", "")]))
        command = [*(IN_BACKGROUND if background else []), sys.executable, "-m", "gem_worker.launcher.cli", *arguments]
        if "--resume" not in arguments:
            command += ["--runs", str(self._runs)]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE)

    def until_it_says(self, pattern: str) -> str:
        """Waits for a line that holds the pattern; returns its first group, or all of it."""

        def said() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.output), self.output
            return re.search(pattern, self.output)

        found: re.Match[str] = wait_until(said, f"gem-train to say {pattern!r}", PATIENCE)
        return found.group(found.lastindex or 0)

    @property
    def address(self) -> str:
        return self.until_it_says(r"server (127\.0\.0\.1:\d+),")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.until_it_says(r"run (\S+):"))

    def until_version(self, version: int) -> int:
        """Waits for so many commits; returns how many there are."""
        with Admin(self.address, timeout=5.0) as admin:

            def reached() -> int:
                assert self.process.poll() is None, self.output
                with suppress(GemError):
                    present = admin.status().version
                    return present if present >= version else 0
                return 0

            return int(wait_until(reached, f"version {version}", PATIENCE))

    def members(self) -> dict[int, str]:
        """The cluster's processes: process id to command line."""
        return {pid: command for pid, command in command_lines() if self.address in command}

    def kill_member(self, text: str) -> None:
        """Kills -9 the one process of the cluster whose command line holds the text."""
        (pid,) = [pid for pid, command in self.members().items() if text in command]
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Leaves nothing running, even after a failed test."""
        if self.process.poll() is None:
            address = re.search(r"server (127\.0\.0\.1:\d+),", self.output)
            self.process.kill()
            self.process.wait()
            for pid, command in command_lines():
                if address and address.group(1) in command:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def command_lines() -> Iterator[tuple[int, str]]:
    """All processes of this machine."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(entry.name), command


Launch = Callable[..., Launcher]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts gem-train in the test's own folder."""
    launched: list[Launcher] = []

    def start(*arguments: str, **settings: Any) -> Launcher:
        launched.append(Launcher(tmp_path, *arguments, **settings))
        return launched[-1]

    yield start
    for launcher in launched:
        launcher.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, by the letter of the standard."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{path.name} holds {constant}, which is no JSON")

    parsed: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return parsed


def last_state(run: Path) -> dict[str, Any]:
    """state.json of the run's newest checkpoint."""
    newest = max((run / "checkpoints").glob("checkpoint-*"))
    return read_json(newest / "state.json")


def commits(run: Path) -> list[dict[str, str]]:
    """The rows of commits.csv."""
    with (run / "commits.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_every_sample_accounted_for(run: Path, epochs: int) -> None:
    """The ledger says that every sample of every epoch is done, and history and checkpoint tell the same story."""
    state, rows = last_state(run), commits(run)
    ledger = state["ledger"]
    assert ledger["samples"] == TRAINING_SAMPLES
    assert ledger["samples_completed"] == epochs * TRAINING_SAMPLES
    assert ledger["completed"] == epochs * SHARDS
    assert ledger["held"] == []
    assert ledger["decks"] == [["", epochs - 1, TRAINING_SAMPLES, []]]
    assert state["samples_committed"] >= ledger["samples_completed"]
    assert [int(row["version"]) for row in rows] == list(range(1, state["version"] + 1))
    assert sum(int(row["samples"]) for row in rows) == state["samples_committed"]


# -- a run that nobody disturbs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A short run of two workers, which has ended."""
    arguments = ("--workers", "2", "--epochs", "8", "--batch-size", "32", "--seed", "3", "--evaluate-every", "0.5")
    launcher = Launcher(tmp_path_factory.mktemp("finished"), *arguments)
    try:
        launcher.wait()
        yield launcher
    finally:
        launcher.close()


def test_a_run_ends_complete_and_says_where_its_results_are(finished: Launcher) -> None:
    assert finished.process.returncode == 0, finished.output
    assert "complete after" in finished.output
    for name in ("report.png", "summary.json", "model.safetensors"):
        assert str(finished.folder / name) in finished.output
    assert "Traceback" not in finished.output
    assert_every_sample_accounted_for(finished.folder, epochs=8)
    assert finished.members() == {}


def test_the_summary_tells_the_run_and_all_its_settings(finished: Launcher) -> None:
    summary = read_json(finished.folder / "summary.json")
    rows = commits(finished.folder)
    assert summary["outcome"] == "complete"
    assert summary["test_accuracy"] > 0.8
    assert summary["commits"] == len(rows) == 8 * 45
    assert summary["samples"] == 8 * TRAINING_SAMPLES
    assert summary["staleness_mean"] == pytest.approx(sum(int(row["staleness"]) for row in rows) / len(rows))
    assert summary["staleness_p95"] >= summary["staleness_mean"]
    assert 0 < summary["pi_median"] <= 5
    assert summary["seconds"] > 0
    assert (summary["rule"], summary["workers"], summary["task"]) == ("gem", 2, "digits")
    assert summary["hyperparameters"].keys() == {field.name for field in fields(Hyperparameters)}
    assert summary["hyperparameters"] | {"batch_size": 32, "seed": 3, "epochs": 8} == summary["hyperparameters"]
    assert summary["versions"].keys() >= {"gem-ps", "python", "torch", "numpy", "numba", "grpcio", "protobuf"}
    assert summary["run_id"] == last_state(finished.folder)["run_id"]


def test_the_report_is_a_picture(finished: Launcher) -> None:
    picture = image.imread(finished.folder / "report.png")
    height, width, _ = picture.shape
    assert min(height, width) > 500
    assert picture[..., :3].std() > 0.01


def test_the_model_loads_into_the_network_and_is_the_last_checkpoints(finished: Launcher) -> None:
    model = safetensors.torch.load_file(finished.folder / "model.safetensors")
    ConvNet().load_state_dict(model)
    with safetensors.safe_open(finished.folder / "model.safetensors", framework="numpy") as file:
        assert int(file.metadata()["gem_version"]) == last_state(finished.folder)["version"]
    newest = max((finished.folder / "checkpoints").glob("checkpoint-*"))
    kept = safetensors.torch.load_file(newest / "model.safetensors")
    assert all(kept[name].equal(value) for name, value in model.items())


def test_the_history_has_a_line_for_every_commit(finished: Launcher) -> None:
    rows = commits(finished.folder)
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["ticket"]) for row in rows] == list(range(1, len(rows) + 1))
    assert {row["worker"] for row in rows} == {"worker-0", "worker-1"}
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_the_workers_logs_are_free_of_warnings(finished: Launcher) -> None:
    for log in (finished.folder / "logs").iterdir():
        assert not re.search(r"warning|traceback", log.read_text(), re.IGNORECASE), log.read_text()


# -- processes that die


def test_a_worker_and_the_server_are_killed_and_the_run_ends_complete(launch: Launch) -> None:
    launcher = launch("--workers", "2", "--epochs", "30")
    launcher.until_version(30)
    launcher.kill_member("--name=worker-0")
    launcher.until_it_says("worker-0 was killed by SIGKILL; restarting it")
    with Admin(launcher.address) as admin:
        kept = admin.checkpoint().version
    launcher.until_version(kept + 10)
    launcher.kill_member("gem_server")
    launcher.until_it_says("server was killed by SIGKILL; restarting it")
    launcher.until_version(kept + 1)
    assert launcher.wait() == 0, launcher.output
    assert_every_sample_accounted_for(launcher.folder, epochs=30)
    assert read_json(launcher.folder / "summary.json")["test_accuracy"] >= 0.9
    assert launcher.members() == {}


def test_ctrl_c_ends_a_run_without_limit_and_it_can_be_resumed_with_other_settings(launch: Launch) -> None:
    """It leaves a checkpoint, a report and no process. What the resumed run was given holds from then on, also in run.json."""
    launcher = launch("--workers", "2", "--until-stopped", background=True)  # which hears Ctrl-C all the same
    launcher.until_version(20)
    members = launcher.members()
    assert len(members) == 3
    assert find_runs(launcher.folder.parent) == {launcher.folder: launcher.address}  # as gem-ctl finds it
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, launcher.output
    assert launcher.members() == {}
    assert "Traceback" not in launcher.output
    run = launcher.folder
    assert find_runs(run.parent) == {}
    assert f"gem-train --resume {run}" in launcher.output
    before = last_state(run)
    assert before["version"] >= 20
    assert before["ledger"]["held"] == []
    summary = read_json(run / "summary.json")
    assert (summary["outcome"], summary["commits"]) == ("stopped", before["version"])
    assert image.imread(run / "report.png")[..., :3].std() > 0.01

    resumed = launch("--resume", str(run), "--epochs", "25", "--learning-rate", "0.04")
    assert resumed.wait() == 0, resumed.output
    state = last_state(run)
    assert state["run_id"] == before["run_id"]
    assert state["hyperparameters"]["learning_rate"] == read_json(run / "run.json")["learning_rate"] == 0.04
    assert "learning_rate='0.05 -> 0.04'" in (run / "logs/server.log").read_text()
    assert_every_sample_accounted_for(run, epochs=25)
    assert read_json(run / "summary.json")["test_accuracy"] >= 0.9


OWN_TASK = '''
"""Lines that fail in one way each."""
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Bad:
    def __init__(self, data):
        self.data = TensorDataset(torch.ones(8, 1), torch.ones(8, 1))

    def model(self):
        return nn.Linear(1, 1)

    def training_data(self):
        return self.data

    test_data = training_data

    def loss(self, model, batch):
        return model(batch[0]).sum() * float("nan")

    def correct(self, model, batch):
        return None


class Fails(Bad):
    def loss(self, model, batch):
        return self.criterion(model(batch[0]), batch[1])  # there is no criterion


class FailsInOneWorker(Bad):
    def loss(self, model, batch):
        if "--name=worker-1" in sys.argv:
            raise RuntimeError("no luck here")
        return model(batch[0]).sum()


class FailsInItsModel(Bad):
    def model(self):
        return nn.Linear(1, "one")


class FailsInItsTest(FailsInOneWorker):
    def correct(self, model, batch):
        raise RuntimeError("no answer is correct")
'''


def test_a_run_that_diverges_at_once_says_so_and_ends_with_status_3(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    launcher = launch("--workers", "1", "--task", "own_task:Bad", path=tmp_path)
    assert launcher.wait() == 3, launcher.output
    assert "worker-0 diverged" in launcher.output
    assert "Traceback" not in launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert (summary["outcome"], summary["commits"]) == ("diverged", 0)


def test_a_task_with_a_bug_ends_the_run_at_once_with_the_users_own_line(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
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


@pytest.mark.slow
def test_a_bug_that_one_worker_alone_has_gets_its_restarts_and_the_run_a_report(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    launcher = launch("--workers", "2", "--task", "own_task:FailsInOneWorker", "--epochs", "1000000", path=tmp_path)
    launcher.until_it_says(r"(?s)(worker-1 ended with status 1; restarting it.*){2}")
    launcher.until_version(1)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 130, launcher.output
    assert read_json(launcher.folder / "summary.json")["outcome"] == "stopped"


@pytest.mark.parametrize(
    ("task", "status", "line"),
    [("FailsInItsModel", 2, 'return nn.Linear(1, "one")'), ("FailsInItsTest", 1, 'raise RuntimeError("no answer is correct")')],
)
def test_a_bug_in_what_the_launcher_itself_calls_is_shown_too(
    task: str, status: int, line: str, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    launcher = launch("--workers", "1", "--task", f"own_task:{task}", "--epochs", "1000000", path=tmp_path)
    assert launcher.wait() == status, launcher.output
    assert line in launcher.output
    assert "Traceback" not in launcher.output
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == (status != 2)


# -- wrong use


def test_a_rules_wrong_option_is_one_line_and_leaves_no_run_behind(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--workers", "1", "--rule-options", "speed=9")
    assert launcher.wait() == 2, launcher.output
    assert "gem-train: the rule has no option 'speed=9': its options are " in launcher.output
    assert launcher.output.splitlines()[-1].startswith("gem-train: ")
    assert not list((tmp_path / "runs").iterdir())


def damaged_mnist(folder: Path) -> Path:
    """A folder whose first file is cut short."""
    folder.mkdir()
    content = struct.pack(">4I", 0x803, 60_000, 28, 28) + b"\0" * 100
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


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


def test_damaged_data_is_named_and_leaves_no_run_behind(tmp_path: Path) -> None:
    data, runs = damaged_mnist(tmp_path / "mnist"), tmp_path / "runs"
    outcome = train("--task", "mnist", "--data", str(data), "--runs", str(runs))
    assert_refused(outcome, "train-images-idx3-ubyte.gz", "116 bytes")
    assert not runs.exists() or not list(runs.iterdir())


def test_a_data_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    outcome = train("--task", "mnist", "--data", str(tmp_path / "nowhere"), "--runs", str(tmp_path / "runs"))
    assert_refused(outcome, "nowhere")


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    assert_refused(train("--task", "cifar", "--runs", str(tmp_path)), "'cifar'", "digits, mnist")


def test_a_run_without_end_is_refused(tmp_path: Path) -> None:
    assert_refused(train("--epochs", "0", "--runs", str(tmp_path)), "--epochs", "--steps")


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert_refused(train("--resume", str(tmp_path)), str(tmp_path), "not the folder of a run")


def test_a_resumed_run_says_what_it_keeps_and_why(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"rule": "gem", "task": "digits", "epochs": 3, "steps": 0}')
    kept = ("--rule", "can't change", "shards leased so far", "start a new run")
    assert_refused(train("--resume", str(tmp_path), "--rule", "downpour", "--learning-rate", "0.01"), *kept)
    assert_refused(train("--resume", str(tmp_path), "--task", "mnist"), "--task", "can't change")
    assert_refused(train("--resume", str(tmp_path), "--epochs", "0"), "would train forever", "--until-stopped")


def test_a_run_until_stopped_has_no_limit(tmp_path: Path) -> None:
    status, said = train("--until-stopped", "--epochs", "5", "--runs", str(tmp_path))
    assert (status, "--until-stopped contradicts --epochs 5" in said) == (2, True)


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(train("--runs", str(tmp_path / "file" / "runs")), "runs")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--worker", "2"],
        ["--workers", "0"],
        ["--workers", "two"],
        ["--rule", "adam"],
        ["--learning-rate", "0"],
        ["--momentum", "1"],
        ["--shards", "some"],
        ["--resume", "no-such-folder"],
        ["digits"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_status_2_and_names_what_is_wrong(arguments: list[str]) -> None:
    status, said = train(*arguments)
    assert status == 2
    assert arguments[0] in said.splitlines()[-1]


# -- the real thing


@pytest.mark.slow
def test_four_workers_learn_mnist_in_150_steps_each(launch: Launch) -> None:
    if not MNIST.is_dir():
        pytest.skip("needs MNIST's four files")
    assert len(read_idx(MNIST, "t10k-labels-idx1-ubyte", 1)) == 10_000
    launcher = launch("--task", "mnist", "--data", str(MNIST), "--workers", "4", "--shards", "replicate", "--steps", "150")
    assert launcher.wait() == 0, launcher.output
    summary = read_json(launcher.folder / "summary.json")
    assert summary["commits"] == 600
    assert summary["test_accuracy"] >= 0.95
