"""Workers on Ray: gem_worker.ray, and gem-train --on ray with what can go wrong. One cluster of one node for all tests."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gem_worker.ray
import pytest
import torch
from click.testing import CliRunner
from engines.ray_cluster import OnRay, RayCluster, ray_cluster
from gem_client import Admin, Unauthenticated
from gem_ctl.cli import main as ctl
from gem_worker.launcher.cluster import MAX_RESTARTS
from gem_worker.launcher.ray_host import Actor, RayHost, without_runs
from gem_worker.launcher.ray_placement import Placement
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.ray import RunError
from kit.server import wait_until
from kit.settings import configured
from launcher.train_helpers import PATIENCE, assert_every_sample_accounted_for, last_state, read_json

pytestmark = pytest.mark.timeout(600)
NOBODY = "127.0.0.1:1"
OWN_TASK = '''
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Good:
    def __init__(self, data):
        self.folder = data
        self.data = TensorDataset(torch.ones(512, 1), torch.ones(512, 1))

    def model(self):
        return nn.Linear(1, 1)

    def training_data(self):
        return self.data

    def test_data(self):
        return self.data

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def correct(self, model, batch):
        return None


class Fails(Good):
    def loss(self, model, batch):
        if not model.training:
            return super().loss(model, batch)  # so that it passes what is tried before the run
        return self.criterion(model(batch[0]), batch[1])  # there is no criterion


class Diverges(Good):
    def loss(self, model, batch):
        return model(batch[0]).sum() * float("nan")


class FirstWorkerFails(Good):
    """Its workers must run in the folder that Ray has copied. The first one to begin fails."""

    def training_data(self):
        assert Path("beside.txt").read_text() == "copied"
        assert "runtime_resources" in os.getcwd()
        try:
            (Path(self.folder) / "began").mkdir()
        except FileExistsError:
            return self.data
        raise RuntimeError("no luck at first")
'''


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def train(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """gem_worker.ray.train on the cluster, with its run and the task's module in the test's folder."""
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()

    def start(task: str, **options: Any) -> gem_worker.ray.Result:
        try:
            return gem_worker.ray.train(task, **{"address": cluster.address, "runs": tmp_path / "runs", **options})
        finally:
            sys.modules.pop("own_task", None)
            torch.set_num_threads(threads)

    return start


def test_a_run_completes_although_the_cluster_has_no_room_for_all_workers(
    train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """And the secrets of the run are readable for its owner alone, and in no log and no other file."""
    result = train("digits", workers=5, epochs=8, evaluate_every=1.0)
    assert result.summary["outcome"] == "complete"
    assert result.summary["test_accuracy"] >= 0.8
    assert_every_sample_accounted_for(result.folder, 8)
    said = capsys.readouterr().out
    assert "5 workers on Ray (CPU=1 each), rule gem, task digits" in said
    assert re.search(r"commits/s .* accuracy\n +\d+:", said), said
    assert said.splitlines()[-1] == f"  model          {result.folder / 'model.safetensors'}"
    folder = RunFolder(result.folder)
    secret = (folder.tokens, folder.worker_token, folder.admin_token)
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    tokens = [path.read_text().strip() for path in secret[1:]]
    assert min(map(len, tokens)) == 64
    texts = [path for path in folder.path.rglob("*") if path.is_file() and path not in secret]
    assert folder.logs / "worker-0.log" in texts
    for path in texts:
        assert not any(token.encode() in path.read_bytes() for token in tokens), f"{path} holds a token"


def test_two_servers_on_this_machine_ask_for_the_same_tokens(
    train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train("digits", servers=2, workers=2, epochs=8, evaluate_every=1.0)
    assert (result.summary["outcome"], result.summary["servers"]) == ("complete", 2)
    assert result.summary["test_accuracy"] >= 0.8
    assert_every_sample_accounted_for(result.folder, 8, "range-0")
    assert last_state(result.folder, "range-1")["version"] == last_state(result.folder, "range-0")["version"]
    assert "2 workers on Ray (CPU=1 each), 2 servers, rule gem" in capsys.readouterr().out
    for log in ("server-0.log", "server-1.log"):
        assert "anyone who can reach" not in (result.folder / "logs" / log).read_text()


def test_a_bug_of_the_task_ends_the_run_with_the_users_line(
    train: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError) as told:
        train("own_task:Fails", workers=2, runtime_env={"working_dir": str(tmp_path)})
    lines = str(told.value).splitlines()
    assert lines[0] == "every worker failed before its first commit:"
    assert re.search(r'own_task\.py", line \d+, in loss$', lines[1]), lines
    assert lines[2].strip() == "return self.criterion(model(batch[0]), batch[1])  # there is no criterion"
    assert "AttributeError: 'Fails' object has no attribute 'criterion'" in lines
    assert told.value.folder is not None
    assert Path(lines[-1].removeprefix("full log: ")).parent == told.value.folder / "logs"
    assert "criterion" not in "".join(capsys.readouterr()), "an error that is raised is not printed too"


def test_a_run_that_diverges_is_an_error(train: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="diverged: a gradient is no longer finite"):
        train("own_task:Diverges", workers=1, runtime_env={"working_dir": str(tmp_path)})
    assert "worker-0 diverged" in capsys.readouterr().out


def test_a_task_that_only_this_process_has_is_answered_with_working_dir(train: Callable[..., Any]) -> None:
    module = types.ModuleType("own_task")
    exec(OWN_TASK, module.__dict__)
    sys.modules["nowhere_else"] = module
    try:
        with pytest.raises(RunError, match=re.escape("runtime_env={'working_dir': FOLDER}")) as told:
            train("nowhere_else:Good", workers=1)
    finally:
        del sys.modules["nowhere_else"]
    assert "worker-0 ended with status 2:" in str(told.value)
    assert "can't import 'nowhere_else' for task 'nowhere_else:Good'" in str(told.value)


def test_an_actor_that_dies_during_its_imports_ends_the_run_with_what_to_look_at(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "structlog.py").write_text("import os\nos._exit(7)\n")  # a library of ours that Ray does not import
    with pytest.raises(RunError) as told:
        train("digits", workers=1, runtime_env={"working_dir": str(tmp_path)})
    assert "worker-0 ended with status 2:" in str(told.value)
    assert f"Ray started it {MAX_RESTARTS + 1} times at most, and it ended before it could begin" in str(told.value)
    assert "/tmp/ray/session_latest/logs/worker-*.err" in str(told.value)


def test_workers_start_in_the_working_dir_and_one_that_failed_is_started_again(
    train: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.txt").write_text("copied")
    task, data = "own_task:FirstWorkerFails", tmp_path / "data"
    data.mkdir()
    result = train(task, workers=2, epochs=3, data=data, runtime_env={"working_dir": str(tmp_path)})
    assert result.summary["samples"] == 3 * 512
    said = capsys.readouterr().out
    assert len(re.findall(r"worker-\d ended with status 1; restarting it", said)) == 1, said
    logs = "".join(path.read_text() for path in (result.folder / "logs").glob("worker-*.log"))
    assert logs.count("RuntimeError: no luck at first") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": NOBODY}, "no Ray cluster at '127.0.0.1:1': "),
        ({"address": "ray://127.0.0.1:10001"}, "is an address of Ray Client"),
        ({"resources_per_worker": {"GPU": -1}}, "--resources 'GPU=-1': write NAME=AMOUNT"),
        ({"labels": {"zone": "a b"}}, "ray_labels 'zone=a b': write NAME=VALUE"),
        ({"rule": "gems"}, "unknown rule 'gems'"),
    ],
)
def test_what_can_not_start_is_one_error_and_leaves_no_folder(
    train: Callable[..., Any], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=re.escape(message)) as told:
        train("digits", **options)
    assert len(str(told.value).splitlines()) == 1
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda folder: gem_worker.ray.train("digits", epoch=3), TypeError, "gem-train has no option 'epoch'"),
        (lambda folder: gem_worker.ray.join(NOBODY, "digits", epochs=3), TypeError, "gem-worker has no option 'epochs'"),
        (lambda folder: gem_worker.ray.join(NOBODY, token_file="token"), TypeError, "token="),
        (lambda folder: gem_worker.ray.join(NOBODY, "digits", workers=1), RunError, NOBODY),
        (lambda folder: gem_worker.ray.train(resume=folder), RunError, "is not the folder of a run that can be resumed"),
    ],
)
def test_wrong_use_is_one_error(call: Callable[[Path], Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(error, match=re.escape(says)):
        call(tmp_path)


def _status(runs: Path) -> str:
    """What gem-ctl shows of the only run in a folder, without being told its address or its token."""
    found = CliRunner().invoke(ctl, ["--runs", str(runs), "status"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.mark.slow
def test_ctrl_c_ends_a_run_on_ray_and_it_can_be_resumed(cluster: RayCluster, tmp_path: Path) -> None:
    """gem-ctl finds the run and its token meanwhile; without the token, or with a wrong one, nobody gets in."""
    run = OnRay(
        tmp_path, "--on", "ray", configured(ray_address=cluster.address), "--workers", "2", "--until-stopped", background=True
    )
    try:
        run.until_version(20)
        wait_until(lambda: "worker-1" in _status(run.folder.parent), "both workers in the status")
        with Admin(run.address) as admin, pytest.raises(Unauthenticated):
            admin.status()
        with pytest.raises(RunError, match="token"):
            gem_worker.ray.join(run.address, "digits", workers=1, token="0" * 64, ray_address=cluster.address)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
        folder = run.folder
        assert f"gem-train --resume {folder}" in run.output
        assert "Traceback" not in run.output
        before = last_state(folder)
        assert before["ledger"]["held"] == [], "the workers returned their shards"
        assert read_json(folder / "summary.json")["outcome"] == "stopped"
        ended = read_json(folder / "summary.json")["leases_ended"]
        assert set(ended) <= {"left"}, f"the workers left by themselves: {ended}"
    finally:
        run.close()

    resumed = OnRay(tmp_path, "--resume", str(folder), "--epochs", "40")
    try:
        assert resumed.wait() == 0, resumed.output
    finally:
        resumed.close()
    assert "2 workers on Ray" in resumed.output
    assert last_state(folder)["run_id"] == before["run_id"]
    assert_every_sample_accounted_for(folder, 40)


def test_runs_are_not_copied_to_the_nodes_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()

    def excludes(where: object, *runs: Path, **more: Any) -> Any:
        made = without_runs({"working_dir": str(where), **more}, runs)
        return made and made["excludes"]

    project = tmp_path / "project"
    assert excludes(project, project / "runs") == ["/runs/"]
    assert excludes(tmp_path, project / "runs", project / "runs" / "one") == ["/project/runs/", "/project/runs/one/"]
    assert excludes(project, tmp_path / "elsewhere") == []
    assert excludes(project, project / "runs", excludes=["*.bin"]) == ["*.bin", "/runs/"]
    assert without_runs({"working_dir": "s3://bucket/code.zip"}, [project]) == {"working_dir": "s3://bucket/code.zip"}
    assert without_runs(None, [project]) is None


def test_ctrl_c_before_a_run_begins_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RayHost, "connect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gem_worker.ray.train("digits", address="local")


def test_an_actors_token_is_not_shown(tmp_path: Path) -> None:
    assert "secret" not in repr(Actor("worker-0", tmp_path / "log", [], {}, "secret", Placement()))


def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; sys.path.insert(0, ''); "
    train = "from gem_worker.launcher.cli import main; main(['--on', 'ray', '--runs', 'runs'])"
    done = subprocess.run([sys.executable, "-c", code + train], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"gem-train: --on ray needs ray, which is not installed: pip install .*\[ray\].*\n", done.stderr)
    assert not os.listdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code + "import gem_worker.ray"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert re.search(r"\nModuleNotFoundError: gem_worker.ray needs ray, which is not installed: pip install ", done.stderr)
