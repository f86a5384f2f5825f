"""deploy/slurm/gem.sbatch: its commands exist, and on a real Slurm it trains to the end while its tasks are requeued."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from docs.test_commands import check, variables
from engines.slurm_cluster import PATIENCE, Slurm, left_behind, missing
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError
from kit.commands import COMMANDS
from kit.pages import ROOT
from kit.server import wait_until

SCRIPT = ROOT / "deploy/slurm/gem.sbatch"
WORKERS, EPOCHS = 4, 200
TRAINING_SAMPLES = 1438  # of the digits


def test_the_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", SCRIPT], check=True)


def test_every_command_and_variable_of_the_script_exists() -> None:
    text = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"\$\{\w+:\+(--.*?)}", r"\1", text)  # an option that is given under a condition
    found = re.findall(r"\b(?:gem-ctl +\w|gem-\w+ +-).*?(?= \d?>| &| \|\||; |\)|\n)", text)
    for line in found:
        check(shlex.split(line, comments=True))
    assert {line.split()[0] for line in found} == set(COMMANDS) - {"gem-train"}
    assert set(re.findall(r"\bGEM_\w+", text)) <= variables()


@pytest.mark.parametrize("option", ["--requeue", "--signal=B:USR1@60", "--open-mode=append"])
def test_what_the_script_relies_on_is_asked_of_slurm(option: str) -> None:
    assert f"#SBATCH {option}\n" in SCRIPT.read_text(encoding="utf-8")


on_a_cluster = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"Slurm can't run here: {missing()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with Slurm(folder, nodes=1 + WORKERS) as cluster:
        yield cluster
    wait_until(lambda: not left_behind(folder), f"the end of every process: {left_behind(folder)}")


def status(run: Path) -> pb.GetStatusResponse:
    """The server's answer; without a run if it can't be reached."""
    with (
        suppress(GemError, OSError),
        Admin((run / "address").read_text().strip(), token=(run / "token").read_text().strip()) as admin,
    ):
        return admin.status()
    return pb.GetStatusResponse()


def commits(run: Path) -> dict[str, int]:
    """How many commits each live worker has made under its present lease."""
    return {worker.name: worker.commits for worker in status(run).workers}


def train(slurm: Slurm, run: Path) -> int:
    """Submits a job array to which few variables are passed on, and waits until each of its workers has committed."""
    exported = "--export=PATH,PYTHONPATH,GEM_STEP_SECONDS"
    options = [exported, str(SCRIPT), "--interface", network()[0], str(run), "--epochs", str(EPOCHS)]
    job = slurm.submit(f"--array=0-{WORKERS}", *options, GEM_STEP_SECONDS="0.06")
    wait_until(lambda: len(commits(run)) == WORKERS and min(commits(run).values()) > 20, "commits of all workers", PATIENCE)
    return job


def network() -> tuple[str, str]:
    """An interface of this machine, and its address."""
    shown = subprocess.run(["ip", "-oneline", "-4", "address", "show", "scope", "global"], capture_output=True, text=True)
    _, interface, _, address, *_ = shown.stdout.split()
    return interface, address.partition("/")[0]


def wait_for_the_end(slurm: Slurm, job: int) -> dict[str, list[str]]:
    """Waits until no task is left; returns state, status and restarts of each."""
    wait_until(lambda: not slurm.run("squeue", "--noheader", f"--jobs={job}"), "the end of the array", 4 * PATIENCE)
    tasks = {str(number): slurm.task(job, number) for number in range(1 + WORKERS)}
    return {number: [task["JobState"], task["ExitCode"], task["Restarts"]] for number, task in tasks.items()}


class TestOnACluster:
    pytestmark = on_a_cluster

    def test_a_run_survives_the_requeue_of_workers_and_of_the_server(self, slurm: Slurm, tmp_path: Path) -> None:
        run = tmp_path / "run"
        job = train(slurm, run)
        assert (run / "token").stat().st_mode & 0o077 == 0
        assert (run / "address").read_text().rpartition(":")[0] == network()[1]
        steps = set(slurm.run("squeue", "--steps", "--noheader", "--format=%i %j").splitlines())
        names = ["gem-server"] + WORKERS * ["gem-worker"]
        assert {f"{job}_{number}.0 {name}" for number, name in enumerate(names)} <= steps, "Slurm does not account for them"

        slurm.run("scontrol", "requeue", f"{job}_2")  # as for a node that fails or is taken by another job
        last = WORKERS  # its job has the number of the whole array
        slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_{last}")  # as Slurm does before the time limit
        wait_until(lambda: not {"worker-2", f"worker-{last}"} & set(commits(run)), "two workers that left", PATIENCE)
        wait_until(lambda: len(commits(run)) == WORKERS and min(commits(run).values()), "the same workers again", PATIENCE)
        assert status(run).leases_ended == {"left": 2}, slurm.output(job)

        before, address = status(run), (run / "address").read_text()
        slurm.run("scontrol", "requeue", f"{job}_0")
        wait_until(lambda: (run / "address").read_text() != address, "the server's new address", PATIENCE)
        wait_until(lambda: len(commits(run)) == WORKERS, "all workers at the new address", PATIENCE)
        after = status(run)
        assert after.run_id == before.run_id
        assert after.version >= before.version
        assert after.state == pb.RUN_STATE_TRAINING, "the run was over before the server was requeued: give it more epochs"

        ends = wait_for_the_end(slurm, job)
        assert ends == {str(number): ["COMPLETED", "0:0", str(int(number in (0, 2, last)))] for number in range(1 + WORKERS)}, (
            slurm.output(job)
        )
        check_samples(run)
        assert (run / "address").read_text() == "done\n"
        assert (run / "report.html").stat().st_size > 10_000
        (accuracy,) = re.findall(r"evaluated .*accuracy=([\d.]+)", slurm.output(job))
        assert float(accuracy) >= 0.95
        assert (run / "model.safetensors").stat().st_size > 4 * before.parameter_count

    def test_a_server_that_cannot_start_cancels_its_workers(self, slurm: Slurm, tmp_path: Path) -> None:
        job = slurm.submit(f"--array=0-{WORKERS}", str(SCRIPT), str(tmp_path), "--rule", "gem:momentum=2")
        ends = wait_for_the_end(slurm, job)
        assert {state for state, _, _ in ends.values()} <= {"CANCELLED", "FAILED"}, ends
        assert "the server ended by itself, status 2: see" in slurm.output(job)


def check_samples(run: Path) -> None:
    """Every sample of every epoch was trained on, and every commit is in the history once, as the version it was told."""
    newest = max((run / "checkpoints").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    assert state["ledger"]["samples_completed"] == EPOCHS * TRAINING_SAMPLES
    with (run / "history.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["version"]) for row in rows] == list(range(1, state["version"] + 1))
    assert sum(int(row["samples"]) for row in rows) == state["samples_committed"]
    assert Counter(row["worker"] for row in rows) == state["steps_done"]
    # Trained on twice: at most two shards of 256 samples for each lease that ended early, 2 by requeue and all by the move.
    assert 0 <= state["samples_committed"] - EPOCHS * TRAINING_SAMPLES <= 2 * 256 * (2 + WORKERS)
