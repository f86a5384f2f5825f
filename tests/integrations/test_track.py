"""`gem-ctl track`: what the trackers' own libraries read back of a real server's run."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result
from gem_api.hyperparameters import Hyperparameters
from gem_api.schedule import rate
from gem_client import Admin, connect
from gem_ctl.cli import main
from gem_ctl.local_runs import Announcement
from gem_ctl.track.follow import Follower
from gem_ctl.track.tracker import Tracker, TrackerError, open_tracker
from gem_ctl.watch import Interrupts
from kit.model import GRADIENT, model
from kit.server import Live, config, serving, wait_until

pytestmark = [
    # Of the trackers' own code: it uses what other libraries, or Python, will remove.
    pytest.mark.filterwarnings(r"ignore:.*:DeprecationWarning:(tensorboard|mlflow|wandb|pydantic)\b.*"),
    pytest.mark.filterwarnings(r"ignore:.*:FutureWarning:(mlflow)\b.*"),
]
SETTINGS = Hyperparameters(rule="gem", epochs=1, shard_size=8, batch_size=4, learning_rate=0.1, warmup_versions=4, seed=7)
SAMPLES = 24  # three shards, so that a run has six commits
COMMITS = 6
BLOCK = 32_768
METRICS = {
    "train/loss", "train/learning_rate", "gem/pi_median", "gem/staleness", "gem/workers", "eval/loss", "eval/accuracy",
}  # fmt: skip


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(config(SETTINGS)) as server:
        yield server


def train(live: Live) -> Generator[int, None, None]:
    """Trains the whole run; yields the version after each commit, and once more after the evaluation of the last one."""
    with connect(live.address, name="alice") as session:
        session.join(model())
        for batch in session.shards(SAMPLES):
            session.commit(GRADIENT, loss=2.0 / (1 + session.version), samples=len(batch))
            yield session.version
        version = session.version
    with Admin(live.address) as admin:
        admin.report_evaluation(version, 0.25, 0.75)
    yield version


def follower(live: Live, tracker: Tracker, lines: list[str], folder: Path | None = None) -> Follower:
    return Follower(Admin(live.address), tracker, folder, lambda path: pull(live, path), lines.append)


def pull(live: Live, path: Path) -> None:
    assert CliRunner().invoke(main, ["--server", live.address, "pull", str(path)]).exit_code == 0


def track(live: Live, tracker: Tracker, model_file: Path) -> list[str]:
    """Follows a whole run, with a look after each commit; returns what was said."""
    lines: list[str] = []
    following, outcome = follower(live, tracker, lines), None
    for _ in train(live):
        outcome = following._step(Interrupts(), model_file)
    assert outcome == "complete"
    following._finish(outcome, model_file)
    return lines


def ctl(live: Live, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--server", live.address, "track", *arguments])


def finish(live: Live) -> None:
    for _ in train(live):
        pass


def run_id(live: Live) -> str:
    return str(live.on_loop(lambda: live.core.run_id))


# -- readers: what each library finds of a run


def tensorboard(to: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(to / run))
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow(to: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{to}")
    (found,) = mlflow_runs(to)
    assert found.info.run_name == run
    return {
        name: sorted((one.step, one.value) for one in client.get_metric_history(found.info.run_id, name))
        for name in found.data.metrics
    }


def mlflow_runs(to: Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{to}")
    experiment = client.get_experiment_by_name("gem")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id])


READERS: dict[str, Callable[[Path, str], dict[str, list[tuple[int, float]]]]] = {"tensorboard": tensorboard, "mlflow": mlflow}


def target(name: str, to: Path) -> str:
    return f"file://{to}" if name == "mlflow" else str(to)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store of mlflow-skinny that needs no server
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_every_metric_is_read_back_at_its_version(name: str, live: Live, tmp_path: Path) -> None:
    to = tmp_path / "to"
    track(live, open_tracker(name, target(name, to)), tmp_path / "model.safetensors")
    found = READERS[name](to, run_id(live))
    assert found.keys() - {"gem/commits_per_second"} == METRICS
    assert found["gem/staleness"] == [(version, 0.0) for version in range(1, COMMITS + 1)]
    assert dict(found["train/learning_rate"]) == {
        version: pytest.approx(rate(SETTINGS, version)) for version in range(1, COMMITS + 1)
    }
    losses = [value for _, value in found["train/loss"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(2.0)
    assert found["eval/loss"] == [(COMMITS, 0.25)]
    assert found["eval/accuracy"] == [(COMMITS, 0.75)]
    assert [value for _, value in found["gem/workers"]][:3] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", READERS)
def test_tracking_twice_repeats_no_point_and_makes_no_second_run(name: str, live: Live, tmp_path: Path) -> None:
    to = tmp_path / "to"
    steps = train(live)
    first: list[str] = []
    again: list[str] = []
    one = follower(live, open_tracker(name, target(name, to)), first)
    for _ in range(3):
        next(steps)
        one._step(Interrupts(), tmp_path / "model")
    one._finish(None, tmp_path / "model")
    two = follower(live, open_tracker(name, target(name, to)), again)
    two._step(Interrupts(), tmp_path / "model")  # of the same version
    for _ in steps:
        outcome = two._step(Interrupts(), tmp_path / "model")
    two._finish(outcome, tmp_path / "model")
    assert [version for version, _ in READERS[name](to, run_id(live))["train/loss"]] == list(range(1, COMMITS + 1))
    assert "going on after version 3" in again[0]
    if name == "mlflow":
        assert len(mlflow_runs(to)) == 1


def test_mlflow_has_settings_outcome_and_model(live: Live, tmp_path: Path) -> None:
    from mlflow.artifacts import download_artifacts

    to = tmp_path / "to"
    track(live, open_tracker("mlflow", f"file://{to}"), tmp_path / "model.safetensors")
    (run,) = mlflow_runs(to)
    wanted = {"rule": "gem", "learning_rate": "0.1", "seed": "7", "parameters": "9", "optimizer": "sgd"}
    assert run.data.params | wanted == run.data.params
    assert (run.info.status, run.data.tags["gem.outcome"]) == ("FINISHED", "complete")
    path = download_artifacts(f"{run.info.artifact_uri}/model.safetensors")
    assert_is_the_model(live, Path(path))


def test_tensorboard_has_settings_outcome_and_the_model_beside_them(live: Live, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    track(live, open_tracker("tensorboard", str(tmp_path / "to")), tmp_path / "model.safetensors")
    folder = tmp_path / "to" / run_id(live)
    events = EventAccumulator(str(folder))
    events.Reload()
    contents = events.PluginTagToContent(metadata.PLUGIN_NAME)
    begin = plugin_data_pb2.HParamsPluginData.FromString(contents[metadata.SESSION_START_INFO_TAG])
    end = plugin_data_pb2.HParamsPluginData.FromString(contents[metadata.SESSION_END_INFO_TAG])
    settings = begin.session_start_info.hparams
    assert (settings["rule"].string_value, settings["learning_rate"].number_value) == ("gem", 0.1)
    assert end.session_end_info.status == api_pb2.STATUS_SUCCESS
    assert_is_the_model(live, folder / "model.safetensors")


def assert_is_the_model(live: Live, path: Path) -> None:
    tensors = safetensors.numpy.load_file(path)
    theta = live.on_loop(lambda: live.core.central.theta.copy())
    assert {name: value.shape for name, value in tensors.items()} == {"w": (2, 3), "b": (3,)}
    assert np.concatenate([tensors["w"].ravel(), tensors["b"].ravel()]).tolist() == theta.tolist()


def test_weights_and_biases_writes_an_offline_run(live: Live, tmp_path: Path) -> None:
    lines = track(live, open_tracker("wandb", "digits"), tmp_path / "model.safetensors")
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{run_id(live)}.wandb")
    wait_until(lambda: len(wandb_history(file)) > COMMITS, "wandb's own process to write what it got")
    found = wandb_history(file)
    assert [row["version"] for row in found if "train/loss" in row] == list(range(1, COMMITS + 1))
    assert [(row["version"], row["eval/loss"], row["eval/accuracy"]) for row in found if "eval/loss" in row] == [
        (COMMITS, 0.25, 0.75)
    ]
    assert f"model: artifact model-{run_id(live)}" in lines


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The logged rows of an offline run: records in the frames of LevelDB's log, with seven bytes of W&B's own before."""
    from wandb.proto import wandb_internal_pb2

    content, at, data, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK  # no frame begins in the last bytes of a block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + length > len(content):
            break  # still being written
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(data)
            data = b""
            if record.WhichOneof("record_type") == "history":
                rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item})
    return rows


# -- how the command begins and ends


def test_the_command_ends_by_itself_when_the_run_is_over(live: Live, tmp_path: Path) -> None:
    finish(live)
    result = ctl(live, "tensorboard", "--to", str(tmp_path / "to"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"tracking run {run_id(live)}: tensorboard --logdir {tmp_path / 'to'}"
    assert lines[1] == f"model: {tmp_path / 'to' / run_id(live) / 'model.safetensors'}"
    assert lines[2] == "the run is over: complete"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mlflow", "--to", "http://127.0.0.1:1"), "MLflow: API request to http://127.0.0.1:1"),
        (("mlflow", "--to", "nonsense://x"), "MLflow: "),
        (("tensorboard", "--to", "/proc/nowhere"), "can't write TensorBoard's files in /proc/nowhere"),
    ],
    ids=["no server", "no store", "no folder"],
)
def test_a_tracker_that_can_not_be_used_is_one_line(arguments: tuple[str, ...], words: str, live: Live) -> None:
    finish(live)
    result = ctl(live, *arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert words in line


def test_without_a_server_it_says_so() -> None:
    result = CliRunner().invoke(main, ["--server", "127.0.0.1:1", "track", "tensorboard"])
    assert result.exit_code == 1
    assert "no server at 127.0.0.1:1" in result.stderr


class Recorder:
    """A tracker that keeps what it gets, and is away if told so."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.outcome: str | None = ""
        self.models: list[bytes] = []
        self.away = False

    def start(self, run_id: str, settings: dict[str, Any]) -> dict[str, int]:
        return {}

    def log(self, version: int, metrics: dict[str, float]) -> None:
        if self.away:
            raise TrackerError("the tracker is away")
        self.points.append((version, metrics))

    def save_model(self, path: Path) -> str:
        self.models.append(path.read_bytes())
        return "kept"

    def finish(self, outcome: str | None) -> None:
        self.outcome = outcome

    def where(self) -> str:
        return "here"


def test_points_wait_while_the_tracker_is_away(live: Live, tmp_path: Path) -> None:
    tracker = Recorder()
    lines: list[str] = []
    following, model_file = follower(live, tracker, lines), tmp_path / "model"
    for version in train(live):
        tracker.away = 2 <= version <= 4
        following._step(Interrupts(), model_file)
    assert [version for version, values in tracker.points if "train/loss" in values] == list(range(1, COMMITS + 1))
    assert lines[1:3] == ["the tracker is away; trying again", "the tracker takes metrics again"]


def test_it_goes_on_through_a_restart_of_the_server_and_repeats_nothing(tmp_path: Path) -> None:
    first = config(SETTINGS, checkpoint_dir=tmp_path / "checkpoints")
    tracker = Recorder()
    lines: list[str] = []
    with serving(first) as live:
        steps = train(live)
        following = follower(live, tracker, lines)
        for _ in range(3):
            next(steps)
            following._step(Interrupts(), tmp_path / "model")
        address, run = live.address, run_id(live)
        steps.close()
    assert following._step(Interrupts(), tmp_path / "model") is None
    with serving(config(SETTINGS, checkpoint_dir=tmp_path / "checkpoints", resume=True, listen=address)) as live:
        assert run_id(live) == run

        def hears_it() -> bool:  # gRPC waits a moment before it connects again
            assert following._step(Interrupts(), tmp_path / "model") is None
            return lines[-1] == "the server responds again"

        wait_until(hears_it, "the follower to reach the restarted server")
        for _ in train(live):
            outcome = following._step(Interrupts(), tmp_path / "model")
    assert outcome == "complete"
    assert lines[1].startswith("the server has gone; waiting for it to come back")
    assert lines[2] == "the server responds again"
    versions = [version for version, values in tracker.points if "train/loss" in values]
    assert versions == sorted(set(versions))
    assert versions[:3] == [1, 2, 3]


@pytest.mark.parametrize("outcome", ["stopped", "diverged", "failed", None])
def test_a_run_of_gem_train_ends_as_its_summary_says(outcome: str | None, tmp_path: Path) -> None:
    """The server of gem-train ends with the run, perhaps before it was seen complete."""
    folder, tracker = tmp_path / "run", Recorder()
    folder.mkdir()
    lines: list[str] = []
    with serving(config(SETTINGS)) as live:
        announcement = Announcement(folder, live.address)
        following = follower(live, tracker, lines, folder)
        next(train(live))
        assert following._step(Interrupts(), tmp_path / "model") is None
    assert following._step(Interrupts(), tmp_path / "model") is None, "gem-train may restart its server"
    if outcome:
        (folder / "summary.json").write_text(json.dumps({"outcome": outcome}))
    (folder / "evaluations.json").write_text(json.dumps([{"version": 1, "loss": 0.5, "accuracy": None}]))
    (folder / "model.safetensors").write_bytes(b"the model")
    announcement.close()
    told = following._step(Interrupts(), tmp_path / "model")
    assert told == (outcome or "failed")
    following._finish(told, tmp_path / "model")
    assert tracker.outcome == told
    assert tracker.points[-1] == (1, {"eval/loss": 0.5})
    assert tracker.models == [b"the model"]


def test_another_run_at_the_same_address_ends_the_tracking(tmp_path: Path) -> None:
    tracker = Recorder()
    lines: list[str] = []
    with serving(config(SETTINGS)) as live:
        following = follower(live, tracker, lines)
        next(train(live))
        following._step(Interrupts(), tmp_path / "model")
        address = live.address
    with serving(config(SETTINGS, listen=address)) as live:
        next(train(live))
        assert following._step(Interrupts(), tmp_path / "model") == "replaced by another run"


def test_ctrl_c_leaves_the_run_open(live: Live, tmp_path: Path) -> None:
    class Pressed(Interrupts):
        def wait(self, call: Callable[[], Any]) -> Any:
            if not isinstance(call, partial):  # not the request, but the pause after it
                raise KeyboardInterrupt
            return call()

    tracker = Recorder()
    lines: list[str] = []
    following = follower(live, tracker, lines)
    next(train(live))
    assert following.follow(60.0, Pressed()) is None
    assert tracker.outcome is None
    assert tracker.models == []
    assert [version for version, _ in tracker.points] == [1]
