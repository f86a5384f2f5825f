"""What the launcher derives from a run's history, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gem_api.history import read_history
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client.ctl import recorded_run
from gem_client.ctl.recorded_run import read_curves
from gem_worker.launcher.cluster import Cluster, Process
from gem_worker.launcher.monitor import RunMonitor, _closing
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks import load_task

OPTIONS = {"workers": 2, "evaluate_every": 60.0, "step_seconds": 0.0, "task": "digits", "device": "cpu"}


def test_the_summary_counts_no_samples_of_commits_that_the_rule_discarded(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.commits.write_text("version,worker,discarded,staleness,samples,pi_median\n1,a,0,0,64,\n1,b,1,9,64,\n2,a,0,1,32,\n")
    cluster = Cluster([Process("server", tmp_path / "server.log", [])], [], print)
    settings = Hyperparameters(rule="ringmaster")
    monitor = RunMonitor("127.0.0.1:1", cluster, folder, load_task("digits", None), settings, OPTIONS)
    try:
        summary = monitor._summary("complete", read_curves(folder.commits), None, 1.0)
    finally:
        monitor.close()
    assert summary["samples"] == 64 + 32


def test_the_history_is_read_once_and_damaged_lines_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    lines = "".join(f"{n},a,0,{n % 4},64,0.5,0.25\n" for n in range(1, 101))
    folder.commits.write_text(f"version,worker,discarded,staleness,samples,pi_median,loss\n{lines}garbage\n")
    opened: list[Path] = []

    def read(path: Path, *arguments: Any) -> Any:
        opened.append(path)
        return read_history(path, *arguments)

    monkeypatch.setattr(recorded_run, "read_history", read)
    cluster = Cluster([Process("server", tmp_path / "server.log", [])], [], print)
    monitor = RunMonitor("127.0.0.1:1", cluster, folder, load_task("digits", None), Hyperparameters(), OPTIONS)
    try:
        monitor.end_early("stopped")
    finally:
        monitor.close()
    assert opened == [folder.commits]
    assert folder.plot.exists()
    assert "1 damaged lines of commits.csv are left out." in (tmp_path / "report.html").read_text()
    summary = json.loads(folder.summary.read_text())
    assert (summary["commits"], summary["samples"], summary["staleness_mean"], summary["staleness_p95"]) == (100, 6400, 1.5, 3)
    assert summary["pi_median"] == 0.5
    assert f"1 damaged lines of {folder.commits} are left out" in capsys.readouterr().out


def test_the_first_line_of_progress_has_the_rate_since_the_first_commit_was_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster([Process("server", tmp_path / "server.log", [])], [], print)
    monitor = RunMonitor("127.0.0.1:1", cluster, RunFolder(tmp_path), load_task("digits", None), Hyperparameters(), OPTIONS)
    began = monitor._began
    try:
        for version, after in ((0, 10.0), (20, 10.5), (50, 11.0)):
            monitor._saw(pb.GetStatusResponse(version=version), began + after)
        monitor._print_progress(began + 11.0)
        header, line = capsys.readouterr().out.splitlines()
    finally:
        monitor.close()
    assert header.split()[:3] == ["time", "commits", "commits/s"]
    assert line.split()[:3] == ["0:11", "50", "60.0"]


@pytest.mark.parametrize(
    ("accuracy", "loss", "line"),
    [(0.975, 0.1, "  test accuracy  97.50 %"), (None, 0.25, "  test loss      0.2500"), (None, None, "  test accuracy  –")],
)
def test_the_closing_lines_show_the_test_loss_of_a_task_without_accuracy(
    tmp_path: Path, accuracy: float | None, loss: float | None, line: str
) -> None:
    summary = {
        "outcome": "complete", "commits": 3, "seconds": 1.0, "step_seconds": 0.0, "test_accuracy": accuracy, "test_loss": loss,
        "staleness_mean": None, "pi_median": None,
    }  # fmt: skip
    assert line in _closing(summary, RunFolder(tmp_path), {"report": "report.html"}).splitlines()
