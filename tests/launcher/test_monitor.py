"""What the launcher derives from a run's history, without a server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gem_api.history import read_history
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import connect
from gem_ctl import recorded_commits
from gem_ctl.recorded_commits import read_commits
from gem_worker.launcher import launch
from gem_worker.launcher.cluster import Cluster, Process
from gem_worker.launcher.contributions import instead, table
from gem_worker.launcher.launch import _monitor
from gem_worker.launcher.monitor import RunMonitor, _closing
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks import load_task
from kit.server import config, serving
from safetensors.numpy import load_file
from torch import nn
from torch.utils.data import TensorDataset

OPTIONS = {"workers": 2, "evaluate_every": 60.0, "step_seconds": "0", "task": "digits", "device": "cpu"}


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[RunMonitor]:
    """A monitor of a run whose server nobody has started."""
    cluster = Cluster([Process("server", tmp_path / "server.log", [])], [], print)
    watching = RunMonitor("127.0.0.1:1", cluster, RunFolder(tmp_path), load_task("digits", None), Hyperparameters(), OPTIONS)
    yield watching
    watching.close()


def test_the_summary_and_the_closing_lines_tell_what_each_worker_brought(monitor: RunMonitor, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.commits.write_text("version,worker,discarded,staleness,samples\n1,a,0,0,64\n1,b,1,9,64\n2,b,0,1,16\n3,a,0,1,64\n")
    known = pb.WorkerStatus(name="b", transport="tcp", batch_share=0.25, pace_seconds=2, waited_seconds=1.5)
    monitor._saw(pb.GetStatusResponse(workers=[known]))
    monitor._saw(pb.GetStatusResponse())  # it has left
    summary = monitor._summary("complete", read_commits(folder.commits), None, 1.0)
    assert summary["samples"] == 64 + 16 + 64, "not those of the commit that the rule discarded"
    each, nothing = summary["brought"], {"share": None, "pace_seconds": None, "waited_seconds": None}
    assert each == {
        "a": {"commits": 2, "batches": 2, **nothing},
        "b": {"commits": 1, "batches": 0.25, "share": 0.25, "pace_seconds": 2, "waited_seconds": 1.5},
    }
    assert list(table(each)) == [
        "worker         commits  batches  share  pace  waited",
        "a                    2        2      –     –       –",
        "b                    1     0.25   0.25   2 s   1.5 s",
    ]


def test_of_many_workers_the_table_shows_those_that_brought_the_most_the_median_and_the_fewest() -> None:
    known = {"commits": 1, "share": None, "pace_seconds": None, "waited_seconds": None}
    lines = list(table({f"w{n}": known | {"batches": n} for n in range(101)}))
    assert [line.split()[:2] for line in lines[1:]] == [["w100", "(most)"], ["w50", "(median)"], ["w0", "(fewest)"]]


def test_the_history_is_read_once_and_damaged_lines_are_said(
    monitor: RunMonitor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    lines = "".join(f"{n},a,0,{n % 4},64,0.5,0.25\n" for n in range(1, 101))
    folder.commits.write_text(f"version,worker,discarded,staleness,samples,pi_median,loss\n{lines}garbage\n")
    opened: list[Path] = []

    def read(path: Path, *arguments: Any) -> Any:
        opened.append(path)
        return read_history(path, *arguments)

    monkeypatch.setattr(recorded_commits, "read_history", read)
    monitor.end_early("stopped")
    assert opened == [folder.commits]
    assert "1 damaged lines of commits.csv are left out." in (tmp_path / "report.html").read_text()
    summary = json.loads(folder.summary.read_text())
    assert (summary["commits"], summary["samples"], summary["staleness_mean"], summary["staleness_p95"]) == (100, 6400, 1.5, 3)
    assert summary["pi_median"] == 0.5
    assert f"1 damaged lines of {folder.commits} are left out" in capsys.readouterr().out


def test_a_line_of_progress_shows_the_servers_view(monitor: RunMonitor, capsys: pytest.CaptureFixture[str]) -> None:
    monitor._saw(pb.GetStatusResponse(version=50, commits_per_second=60.0, worker_count=3))
    monitor._print_progress(monitor._began + 11.0)
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["time", "commits", "commits/s"]
    assert line.split()[:3] == ["0:11", "50", "60.0"]
    assert "3" in line.split()


@pytest.mark.parametrize(
    ("accuracy", "loss", "line"),
    [(0.975, 0.1, "  test accuracy  97.50 %"), (None, 0.25, "  test loss      0.2500"), (None, None, "  test accuracy  –")],
)
def test_the_closing_lines_show_the_test_loss_of_a_task_without_accuracy(
    tmp_path: Path, accuracy: float | None, loss: float | None, line: str
) -> None:
    summary = {
        "outcome": "complete", "commits": 3, "start_seconds": 2.0, "seconds": 1.0, "step_seconds": "0",
        "test_accuracy": accuracy, "test_loss": loss, "staleness_mean": None, "pi_median": None,
        "brought": {}, "instead": {},
    }  # fmt: skip
    lines = _closing(summary, RunFolder(tmp_path), {"report": "report.html"}).splitlines()
    assert line in lines
    assert "complete after 3 commits: 2 s to start, 1 s of training" in lines


def test_a_run_of_unequal_simulated_workers_says_what_others_would_need_for_as_many_samples(tmp_path: Path) -> None:
    assert instead(90.0, "0.1,0.4,0.1,0.1", 4) == {
        "none_waits_seconds": 2.8, "fastest_alone_seconds": 9.0, "fast_workers": 3, "fast_in_step_seconds": 3.0,
        "all_in_step_seconds": 9.0,
    }  # fmt: skip
    assert instead(90.0, "0.1,0.1,0.1,0.4", 6)["all_in_step_seconds"] == 6.0
    assert instead(90.0, "0.1,0.1,0.1,0.4", 3) == instead(90.0, "0.1", 4) == {}
    assert instead(90.0, "0", 4) == instead(90.0, "0,0.4", 4) == {}
    summary = {
        "outcome": "complete", "commits": 3, "start_seconds": 2.0, "seconds": 4.0, "step_seconds": "0.1,0.1,0.4",
        "test_accuracy": None, "test_loss": None, "staleness_mean": None, "pi_median": None,
        "brought": {}, "instead": instead(90.0, "0.1,0.1,0.4", 3),
    }  # fmt: skip
    lines = _closing(summary, RunFolder(tmp_path), {}).splitlines()
    assert "complete after 3 commits: 2 s to start, 4 s of training (simulated step time 0.1, 0.1, 0.4 s)" in lines
    assert "    this run, measured, with exchanges    4 s" in lines
    assert "    all, as here, if none waits           4 s" in lines
    assert "    the fastest worker alone              9 s" in lines
    assert "    the 2 fastest in step                 4 s" in lines
    assert "    all in step, waiting for the slowest  12 s" in lines


class Line:
    """A model of one number, on ten samples. `correct` fails from its n-th call on, n being `lasts`."""

    def __init__(self, lasts: float) -> None:
        self.lasts = lasts

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def training_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(10, 1))

    test_data = training_data

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).mean()
        return loss

    def correct(self, model: nn.Module, batch: Any) -> int:
        self.lasts -= 1
        if self.lasts <= 0:
            raise RuntimeError("no answer is correct")
        return 9


@dataclass
class Watched:
    """A run of a live server that a launcher monitors, without processes.

    Attributes:
        monitor: The launcher's monitor.
        folder: The run's folder.
        said: What the launcher complained of.
        reported: The evaluations that it reported.
    """

    monitor: RunMonitor
    cluster: Cluster
    folder: RunFolder
    said: list[str]
    reported: list[dict[str, Any]]

    def run(self) -> int:
        """Monitors the run to its end; returns the exit status."""
        return _monitor(self.monitor, self.cluster, self.folder, False, self.said.append)

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.folder.summary.read_text())
        return summary


@pytest.fixture
def watched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A run of one epoch, of which `param` gives the task's `lasts`, the shards that are trained, and whether its only worker
    has ended."""
    lasts, shards, ended = request.param
    monkeypatch.setattr(launch, "ignore_signals", lambda: None)
    monkeypatch.setattr(RunMonitor, "_write_report", lambda *_: "")
    folder, settings = RunFolder(tmp_path), Hyperparameters(batch_size=5, shard_size=5, epochs=1)
    with serving(config(settings, history=folder.commits)) as live:
        with connect(live.address) as session:
            session.join({"weight": np.ones((1, 1), np.float32)})
            for _, _ in zip(range(shards), session.shards(10), strict=False):
                session.commit(np.ones(1, np.float32))
        worker = Process("worker-0", tmp_path / "worker-0.log", [])
        monkeypatch.setattr(worker, "start", lambda *_: None)
        monkeypatch.setattr(type(worker), "status", property(lambda _: 0 if ended else None))
        cluster = Cluster([], [worker], print)
        monkeypatch.setattr(cluster, "stop", live.stop)
        reported: list[dict[str, Any]] = []
        monitor = RunMonitor(live.address, cluster, folder, Line(lasts), settings, OPTIONS, report=reported.append)
        try:
            yield Watched(monitor, cluster, folder, [], reported)
        finally:
            monitor.close()


@pytest.mark.parametrize("watched", [(2, 2, True)], indirect=True)
def test_an_error_in_the_last_evaluation_does_not_cost_the_model(watched: Watched) -> None:
    """It was fine on the first batch, before the run."""
    assert watched.run() == 1
    assert "no answer is correct" in watched.said[0]
    assert load_file(watched.folder.model).keys() == {"weight"}
    assert (watched.summary["outcome"], watched.summary["commits"], watched.summary["test_accuracy"]) == ("complete", 2, None)


@pytest.mark.parametrize("watched", [(2, 1, False)], indirect=True)
def test_an_error_in_an_evaluation_on_the_way_ends_the_run_which_can_be_resumed(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.cluster.committed = True
    assert watched.run() == 1
    assert "no answer is correct" in watched.said[0]
    assert watched.folder.model.exists()
    assert watched.summary["outcome"] == "failed"
    assert f"Resume with:  gem-train --resume {watched.folder.path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("watched", "status", "outcome"),
    [((math.inf, 2, False), 0, "complete"), ((math.inf, 1, False), 130, "stopped")],
    indirect=["watched"],
)
def test_a_signal_just_after_the_last_epoch_finds_the_run_complete(
    watched: Watched, status: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers have not ended yet. With a shard left it is stopped."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(watched.monitor, "run", interrupted)
    assert (watched.run(), watched.summary["outcome"]) == (status, outcome)
    assert watched.folder.model.exists() == (status == 0)
    assert watched.summary["test_accuracy"] == (0.9 if status == 0 else None)


@pytest.mark.parametrize("watched", [(math.inf, 2, True)], indirect=True)
def test_the_last_evaluation_of_a_complete_run_is_reported_as_such(watched: Watched) -> None:
    assert watched.run() == 0
    assert watched.reported[-1] == {
        "test_loss": pytest.approx(watched.summary["test_loss"]), "test_accuracy": 0.9, "version": 2, "epoch": 0, "done": True,
        "folder": str(watched.folder.path),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("watched", "version", "done", "outcome"),
    [((math.inf, 1, False), 1, False, "stopped"), ((math.inf, 2, True), 2, True, "complete")],
    indirect=["watched"],
)
@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_an_exception_of_the_report_stops_the_run_and_comes_out(
    watched: Watched, version: int, done: bool, outcome: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Tune stops a function's trial by SystemExit."""

    def enough(metrics: dict[str, Any]) -> None:
        watched.reported.append(metrics)
        raise error

    monkeypatch.setattr(watched.monitor, "_report", enough)
    with pytest.raises(error):
        watched.run()
    assert [(each["version"], each["done"]) for each in watched.reported] == [(version, done)]
    assert watched.summary["outcome"] == outcome
