"""Follows a running cluster: progress on the terminal, evaluations, and the run's results at its end."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click
import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError, Retry, connect

from gem_worker.cluster import Cluster
from gem_worker.evaluate import Evaluator, Score
from gem_worker.report import plot_report
from gem_worker.run_folder import RunFolder, versions
from gem_worker.tasks import Task

_POLL_SECONDS, _PRINT_SECONDS = 0.25, 2.0
_HEADER = "    time  commits  commits/s     loss  staleness  median π  workers     epoch  accuracy"


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
        self._reader = connect(address, retry=Retry(give_up_after=5.0))
        self._evaluator = Evaluator(task)
        self._scores = folder.load_evaluations()
        self._began = time.monotonic()
        self._evaluated_at = self._began
        self._evaluation_seconds = 0.0
        self._printed = (self._began, 0)
        self._status: pb.GetStatusResponse | None = None

    def follow(self) -> int:
        """Until all workers have ended; then writes the results. Returns the exit status. Raises ClusterError."""
        click.echo(_HEADER)
        seen = 0
        while not self._cluster.finished:
            time.sleep(_POLL_SECONDS)
            self._poll()
            version = self._status.version if self._status else 0
            self._cluster.tend(healthy=version > seen)
            seen = version
            if self._due_for_evaluation(version):
                self._evaluate()
            self._print_progress()
        return self._finish()

    def close(self) -> None:
        self._reader.close()
        self._admin.close()

    def _poll(self) -> None:
        try:
            self._status = self._admin.status()
        except GemError:
            return  # not up yet, or being started again: `tend` sees to that

    def _due_for_evaluation(self, version: int) -> bool:
        """Evaluating may take at most about a tenth of the launcher's time: the workers want the processor."""
        pause = max(self._options["evaluate_every"], 10 * self._evaluation_seconds)
        newer = not self._scores or version > self._scores[-1].version
        return version > 0 and newer and time.monotonic() - self._evaluated_at > pause

    def _evaluate(self) -> Score | None:
        began = time.monotonic()
        try:
            theta = self._reader.pull()
            score = self._evaluator.score(self._reader.version, self._reader.layout, theta)
            self._admin.report_evaluation(score.version, score.loss, score.accuracy)
        except GemError:
            return None  # the server is being started again: there will be another evaluation
        self._evaluated_at = time.monotonic()
        self._evaluation_seconds = self._evaluated_at - began
        self._scores.append(score)
        self._folder.save_evaluations(self._scores)
        return score

    def _print_progress(self) -> None:
        now, status = time.monotonic(), self._status
        before, commits = self._printed
        if status is None or now - before < _PRINT_SECONDS or not status.version:
            return
        self._printed = now, status.version
        rate = max(0, status.version - commits) / (now - before) if commits else 0.0
        click.echo(_progress_line(now - self._began, rate, status, self._scores[-1] if self._scores else None))

    def _finish(self) -> int:
        self._poll()
        score = self._evaluate()
        self._folder.save_model(self._reader.layout, self._reader.theta, self._reader.version)
        seconds = time.monotonic() - self._began
        self._cluster.stop()
        history = self._folder.history()
        title = f"{self._options['task']}: rule {self._settings.rule}, {self._options['workers']} workers, learning rate {self._settings.learning_rate}"
        plot_report(self._folder.report, title, history, self._scores, self._options["workers"])
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
            "commits": len(staleness),
            "samples": int(history["samples"].sum()),
            "staleness_mean": float(staleness.mean()),
            "staleness_p95": float(np.percentile(staleness, 95)),
            "pi_median": None if np.isnan(pi).all() else float(np.nanmedian(pi)),
            "seconds": round(seconds, 1),
            "commits_per_second": round(len(staleness) / seconds, 1),
            "rule": self._settings.rule,
            "workers": self._options["workers"],
            "task": self._options["task"],
            "hyperparameters": asdict(self._settings),
            "leases_ended": dict(status.leases_ended) if status else {},
            "run_id": status.run_id if status else None,
            "versions": versions(),
        }


def _progress_line(seconds: float, rate: float, status: pb.GetStatusResponse, score: Score | None) -> str:
    loss = f"{status.training_loss:8.4f}" if status.HasField("training_loss") else "       –"
    pi = f"{status.pi_median:9.3f}" if status.HasField("pi_median") else "        –"
    accuracy = f"{100 * score.accuracy:7.2f} %" if score and score.accuracy is not None else "        –"
    epoch = f"{status.shards.epoch + 1}/{status.shards.epochs or '–'}"
    return (
        f"{int(seconds) // 60:5d}:{int(seconds) % 60:02d}{status.version:9d}{rate:11.1f} {loss}{status.staleness:11.1f} {pi}"
        f"{len(status.workers):9d}{epoch:>10} {accuracy}"
    )


def _closing(summary: dict[str, Any], folder: RunFolder) -> str:
    accuracy, pi = summary["test_accuracy"], summary["pi_median"]
    lines = [
        "",
        f"{summary['outcome']} after {summary['commits']} commits in {summary['seconds']:.0f} s",
        f"  test accuracy  {'–' if accuracy is None else f'{100 * accuracy:.2f} %'}",
        f"  staleness      mean {summary['staleness_mean']:.1f}, 95 % below {summary['staleness_p95']:.0f}",
        f"  median π       {'–' if pi is None else f'{pi:.3f}'}",
        f"  plot           {folder.report}",
        f"  summary        {folder.summary}",
        f"  model          {folder.model}",
    ]
    return "\n".join(lines)
