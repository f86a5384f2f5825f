"""Follows a running cluster: progress on the terminal, evaluations, and the run's results at its end."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, NamedTuple

import click
import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError

from gem_worker.cluster import Cluster
from gem_worker.evaluate import Score
from gem_worker.report import plot_report
from gem_worker.run_folder import RunFolder, samples_applied, versions
from gem_worker.scorer import Scorer
from gem_worker.tasks import Task

_POLL_SECONDS, _PRINT_SECONDS = 0.25, 2.0
_HEADER = "    time  commits  commits/s     loss  staleness  median π  workers     epoch  accuracy"


class _Moment(NamedTuple):
    """When the progress was printed, and the version then."""

    at: float
    version: int


class Follower:
    """Watches one run from the launcher.

    Args:
        address: The server's.
        cluster: Its processes.
        folder: Where the results go.
        task: For the evaluations.
        settings: The run's hyper-parameters.
        options: The launcher's other options.
    """

    def __init__(
        self, address: str, cluster: Cluster, folder: RunFolder, task: Task, settings: Hyperparameters, options: dict[str, Any]
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._settings = settings
        self._options = options
        self._admin = Admin(address, timeout=5.0)
        self._scorer = Scorer(address, task, folder, options["evaluate_every"])
        self._began = time.monotonic()
        self._printed = _Moment(self._began, 0)
        self._joined = -1
        self._status: pb.GetStatusResponse | None = None

    def follow(self) -> int:
        """Until all workers have ended; then writes the results. Returns the exit status. Raises ClusterError."""
        seen = 0
        while not self._cluster.finished:
            time.sleep(_POLL_SECONDS)
            self._poll()
            version = self._status.version if self._status else 0
            self._cluster.tend(healthy=version > seen)
            seen = version
            self._print_progress()
        return self._finish()

    def close(self) -> None:
        self._scorer.close()
        self._admin.close()

    def _poll(self) -> None:
        try:
            status = self._admin.status()
        except GemError:
            return  # not up yet, or being started again: `tend` sees to that
        if self._status is None and self._options.get("resume"):
            self._folder.save_options(self._options)  # the server has accepted what this start changes
        self._status = status
        self._scorer.offer(self._status.version)

    def _print_progress(self) -> None:
        now, status, before = time.monotonic(), self._status, self._printed
        if now - before.at < _PRINT_SECONDS:
            return
        version = status.version if status else 0
        self._printed = _Moment(now, version)
        if status is None or not version:
            self._print_start(len(status.workers) if status else 0)
            return
        if not before.version:
            click.echo(_HEADER)
        rate = max(0, version - before.version) / (now - before.at) if before.version else 0.0
        click.echo(_progress_line(now - self._began, rate, status, self._scorer.last))

    def _print_start(self, joined: int) -> None:
        if joined != self._joined:
            self._joined = joined
            click.echo(f"  starting: {joined} of {self._options['workers']} workers have joined")

    def _finish(self) -> int:
        self._poll()
        score = self._scorer.last_of_all()
        seconds = time.monotonic() - self._began
        self._cluster.stop()
        history = self._folder.history()
        plot_report(
            self._folder.report, _title(self._settings, self._options), history, self._scorer.scores, self._options["workers"]
        )
        summary = self._summary(history, score, seconds)
        self._folder.save_summary(summary)
        click.echo(_closing(summary, self._folder))
        return 3 if self._cluster.diverged else 0

    def _summary(self, history: dict[str, Any], score: Score | None, seconds: float) -> dict[str, Any]:
        staleness, pi = history["staleness"], history["pi_median"]
        status = self._status
        return {
            "outcome": "diverged" if self._cluster.diverged else "complete",
            "test_accuracy": score.accuracy if score else None,
            "test_loss": score.loss if score else None,
            "commits": status.version if status else len(staleness),  # the history may lack some, where a server was killed
            "samples": int(samples_applied(history).sum()),
            "staleness_mean": float(staleness.mean()) if staleness.size else None,
            "staleness_p95": float(np.percentile(staleness, 95)) if staleness.size else None,
            "pi_median": None if np.isnan(pi).all() else float(np.nanmean(pi)),  # mean over commits of each one's median
            "seconds": round(seconds, 1),
            "rule": self._settings.rule,
            "workers": self._options["workers"],
            "processes": len(self._cluster.workers),
            "step_seconds": self._options["step_seconds"],
            "task": self._options["task"],
            "hyperparameters": asdict(self._settings),
            "leases_ended": dict(status.leases_ended) if status else {},
            "run_id": status.run_id if status else None,
            "versions": versions(),
        }


def _title(settings: Hyperparameters, options: dict[str, Any]) -> str:
    """What the report is of."""
    title = f"{options['task']}: rule {settings.rule}, {options['workers']} workers, learning rate {settings.learning_rate}"
    title += f", {settings.local_steps} local steps" if settings.local_steps > 1 else ""
    return f"{title}\n{_simulated(options['step_seconds'])}" if options["step_seconds"] else title


def _simulated(step_seconds: float) -> str:
    return f"simulated step time {step_seconds:g} s"


def _progress_line(seconds: float, rate: float, status: pb.GetStatusResponse, score: Score | None) -> str:
    loss = f"{status.training_loss:8.4f}" if status.HasField("training_loss") else "       –"
    pi = f"{status.pi_median:9.3f}" if status.HasField("pi_median") else "        –"
    accuracy = f"{100 * score.accuracy:7.2f} %" if score and score.accuracy is not None else "        –"
    epoch = f"{status.shards.epoch + 1}/{status.shards.epochs or '–'}"
    return (
        f"{int(seconds) // 60:5d}:{int(seconds) % 60:02d}{status.version:9d}{rate:11.1f} {loss}{status.staleness:11.1f} {pi}"
        f"{len(status.workers):9d}{epoch:>10} {accuracy}"
    )


def _staleness(summary: dict[str, Any]) -> str:
    if summary["staleness_mean"] is None:
        return "–"
    return f"mean {summary['staleness_mean']:.1f}, 95 % at most {summary['staleness_p95']:.0f}"


def _closing(summary: dict[str, Any], folder: RunFolder) -> str:
    accuracy, pi = summary["test_accuracy"], summary["pi_median"]
    simulated = f" ({_simulated(summary['step_seconds'])})" if summary["step_seconds"] else ""
    lines = [
        "",
        f"{summary['outcome']} after {summary['commits']} commits in {summary['seconds']:.0f} s{simulated}",
        f"  test accuracy  {'–' if accuracy is None else f'{100 * accuracy:.2f} %'}",
        f"  staleness      {_staleness(summary)}",
        f"  median π       {'–' if pi is None else f'{pi:.3f}, mean over the commits'}",
        f"  plot           {folder.report}",
        f"  summary        {folder.summary}",
        f"  model          {folder.model}",
    ]
    return "\n".join(lines)
