"""Monitors a running cluster: progress on the terminal, evaluations, and the results at the end."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gem_api.history import HistoryError
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.option_types import times
from gem_api.process.progress import say
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError
from gem_ctl.recorded_commits import RecordedCommits, read_commits
from gem_ctl.run_report import write_report
from gem_ctl.text import optional

from gem_worker.device import devices
from gem_worker.evaluation import Score
from gem_worker.launcher.cluster import Cluster, ClusterError
from gem_worker.launcher.contributions import contributions, instead, table
from gem_worker.launcher.run_folder import RunFolder, versions
from gem_worker.launcher.scorer import Scorer
from gem_worker.launcher.tracebacks import users_frames
from gem_worker.tasks import Task, TaskError

_POLL_SECONDS, _PRINT_SECONDS = 0.25, 2.0
_HEADER = "    time  commits  commits/s     loss  staleness  median π  workers     epoch  accuracy"


class RunMonitor:
    """Polls the server of one run, prints progress, restarts dead processes and saves the results.

    Args:
        address: The server's address; the leader's if there are several.
        cluster: The run's processes.
        folder: Receives the results.
        task: The model and the held-out data.
        hyperparameters: The run's hyper-parameters.
        options: The launcher's other options.
        device: Where to evaluate the model, as for --device.
        token: The access token of an admin, if the server asks for one.
        report: Told each evaluation, as `gem_worker.ray.train` says.
    """

    def __init__(
        self,
        address: str,
        cluster: Cluster,
        folder: RunFolder,
        task: Task,
        hyperparameters: Hyperparameters,
        options: dict[str, Any],
        device: str = "cpu",
        token: str | None = None,
        report: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._hyperparameters = hyperparameters
        self._options = options
        self._admin = Admin(address, timeout=5.0, token=token)
        self._scorer = Scorer(address, task, folder, options["evaluate_every"], devices(device)[0], token)
        self._began = time.monotonic()
        self._training: float | None = None  # since when commits have been applied
        self._printed_at = self._began
        self._has_header = False
        self._joined = -1
        self._finishing = False
        self._ended = False  # the results of the whole run are saved
        self._status: pb.GetStatusResponse | None = None
        self._report = report
        self._reported = self._scorer.last
        self._workers: dict[str, pb.WorkerStatus] = {}  # what was last said of each that has committed, also if it has left

    def run(self) -> int:
        """Monitors the run to its end and writes the results; returns the exit status. Raises ClusterError."""
        seen: int | None = None if self._cluster.resume else 0  # a resumed run already has commits
        while not self._cluster.finished:
            time.sleep(_POLL_SECONDS)
            self._ask_about(self._cluster.done)
            version = self._status.version if self._status else seen
            self._cluster.supervise(healthy=seen is not None and version is not None and version > seen, now=time.monotonic())
            self._raise_failed_evaluation()
            self._report_evaluation()
            seen = version
            self._print_progress(time.monotonic())
        return self._finish()

    def end_trained(self) -> int | None:
        """Ends a run that is interrupted when everything was trained: as `run`, but a final evaluation that was under way is
        not repeated. Returns None, and does nothing, if there is something left to train."""
        if not self._finishing:
            self._ask_about(self._cluster.done)
        # With --shards replicate the state leaves out a worker that is being restarted.
        shared = self._hyperparameters.shards == "partition"
        complete = shared and self._cluster.complete
        if not (self._finishing or self._cluster.finished or complete):
            return None
        return self._finish()

    def end_early(self, outcome: str) -> None:
        """Writes the results so far of a run that was "stopped" or "failed", unless those of the whole run are saved. Call it
        after the cluster has stopped."""
        if self._ended:
            return
        try:
            commits = read_commits(self._folder.commits)
        except (OSError, HistoryError):
            return  # no history yet, or a killed server left a partial line
        if commits.first is not None:
            self._save_results(outcome, commits, self._scorer.last, time.monotonic())

    def close(self) -> None:
        self._scorer.close()
        self._admin.close()

    def _ask_about(self, done: set[str]) -> None:
        """Has the server say whether the run is complete, as the workers that are done claim."""
        if self._poll() and self._status is not None:
            self._cluster.asked(self._status.state, done)

    def _poll(self) -> bool:
        """Asks for the status; returns whether the server has answered."""
        try:
            status = self._admin.status()
        except GemError:
            return False  # the server is starting or has died; `supervise` restarts it
        if self._status is None and self._options.get("resume"):
            self._store_changed_options()
        self._saw(status)
        self._scorer.offer(status.version)
        return True

    def _store_changed_options(self) -> None:
        """The server has accepted the changed options of a resumed run: another --resume uses them too."""
        try:
            self._folder.save_options(self._options)
        except OSError as error:
            say(f"  the changed options can't be stored, so that another --resume must repeat them: {error}")

    def _saw(self, status: pb.GetStatusResponse) -> None:
        """Takes in a status of the server."""
        self._status = status
        if self._training is None and status.version > status.start_version:
            self._training = time.monotonic()
        self._workers |= {worker.name: worker for worker in status.workers if worker.transport}

    @property
    def failed_evaluation(self) -> str | None:
        """The task's error in an evaluation, with its part of the traceback; None if nothing."""
        if (failure := self._scorer.failure) is None:
            return None
        text = str(failure) if isinstance(failure, TaskError) else users_frames("".join(traceback.format_exception(failure)))
        return f"the evaluation of the model failed:\n{text}"

    def _raise_failed_evaluation(self) -> None:
        if (why := self.failed_evaluation) is not None:
            self._scorer.save_model()
            raise ClusterError(why)

    def _report_evaluation(self, done: bool = False) -> None:
        """Tells `_report` the last evaluation, unless it knows it; at the end in any case."""
        if self._report is None or (score := self._scorer.last) is None or (score is self._reported and not done):
            return
        self._reported = score
        accuracy = {} if score.accuracy is None else {"test_accuracy": score.accuracy}
        known = {"test_loss": score.loss, **accuracy, "version": score.version, "folder": str(self._folder.path), "done": done}
        self._report(known | ({"epoch": self._status.shards.epoch} if self._status else {}))

    def _print_progress(self, now: float) -> None:
        status = self._status
        if now - self._printed_at < _PRINT_SECONDS:
            return
        self._printed_at = now
        if status is None or not status.version:
            self._print_start(status.worker_count if status else 0)
            return
        if not self._has_header:
            self._has_header = True
            say(_HEADER)
        say(_progress_line(now - self._began, status, self._scorer.last))

    def _print_start(self, joined: int) -> None:
        if joined != self._joined:
            self._joined = joined
            say(f"  starting: {joined} of {self._options['workers']} workers have joined")

    def _finish(self) -> int:
        again, self._finishing = self._finishing, True
        self._poll()
        self._scorer.end()
        if not again:
            self._scorer.final_score()
        ended = time.monotonic()
        self._cluster.stop()
        score, final = self._scorer.last, self._status.version if self._status else 0
        self._save_results(
            "diverged" if self._cluster.diverged else "complete",
            self._commits(),
            score if score and score.version >= final else None,
            ended,
        )
        self._ended = True
        self._report_evaluation(done=True)
        return 3 if self._cluster.diverged else 0

    def _commits(self) -> RecordedCommits:
        """The run's history; an empty one if it can't be read: the run's results don't depend on it."""
        try:
            return read_commits(self._folder.commits)
        except (OSError, HistoryError) as error:
            say(f"  the summary lacks the history: {error}")
            return RecordedCommits()

    def _save_results(self, outcome: str, commits: RecordedCommits, score: Score | None, ended: float) -> None:
        """Writes the summary and the report, and prints the closing lines."""
        summary = self._summary(outcome, commits, score, ended)
        self._folder.save_summary(summary)
        files = {"report": self._write_report(commits)}
        if commits.damaged:
            files["history"] = f"{commits.damaged} damaged lines of {self._folder.commits} are left out"
        say(_closing(summary, self._folder, files))

    def _write_report(self, commits: RecordedCommits) -> str:
        """Writes the report; returns its path, or why there is none. Nothing that goes wrong here, such as a full disk, may end
        the run with a failure."""
        try:
            return str(write_report(self._folder.path, commits))
        except Exception as error:
            return f"none: {error}; write it with gem-ctl report {self._folder.path}"

    def _summary(self, outcome: str, commits: RecordedCommits, score: Score | None, ended: float) -> dict[str, Any]:
        training = ended if self._training is None else self._training
        status, recorded = self._status, int(commits.final)
        options, batch_size = self._options, self._hyperparameters.batch_size
        return {
            "outcome": outcome,
            "test_accuracy": score.accuracy if score else None,
            "test_loss": score.loss if score else None,
            # The history may lack commits if a server was killed; the last status may be older than the last commit.
            "commits": max(status.version, recorded) if status else recorded,
            **_figures(commits),
            "start_seconds": round(training - self._began, 1),
            "seconds": round(ended - training, 1),
            "rule": self._hyperparameters.rule,
            "workers": options["workers"],
            "processes": len(self._cluster.workers),
            "servers": len(self._cluster.servers),
            "step_seconds": options["step_seconds"],
            "task": options["task"],
            "hyperparameters": asdict(self._hyperparameters),
            "commits_via": dict(Counter(worker.transport for worker in self._workers.values())),
            "brought": contributions(commits, self._workers, batch_size),
            "instead": instead(commits.samples / batch_size, options["step_seconds"], options["workers"]),
            "leases_ended": dict(status.leases_ended) if status else {},
            "run_id": status.run_id if status else None,
            "versions": versions(),
        }


def _figures(commits: RecordedCommits) -> dict[str, Any]:
    """The summary's figures over all commits; None for those that the history does not have."""
    return {
        "samples": int(commits.samples),
        "staleness_mean": commits.mean("staleness"),
        "staleness_p95": commits.staleness_below(0.95),
        "pi_median": commits.mean("pi_median"),  # mean over the commits of their medians
    }


def _progress_line(seconds: float, status: pb.GetStatusResponse, score: Score | None) -> str:
    rate, loss, pi = (
        optional(status, name, form)
        for name, form in (("commits_per_second", ".1f"), ("training_loss", ".4f"), ("pi_median", ".3f"))
    )
    accuracy = f"{100 * score.accuracy:.2f} %" if score and score.accuracy is not None else "–"
    epoch = f"{status.shards.epoch + 1}/{status.shards.epochs or '–'}"
    passed = f"{int(seconds) // 60:5d}:{int(seconds) % 60:02d}"
    return (
        f"{passed}{status.version:9d}{rate:>11} {loss:>8}{status.staleness:11.1f} {pi:>9}{status.worker_count:9d}{epoch:>10} "
        f"{accuracy:>9}"
    )


def _staleness(summary: dict[str, Any]) -> str:
    if summary["staleness_mean"] is None:
        return "–"
    return f"mean {summary['staleness_mean']:.1f}, 95 % at most {summary['staleness_p95']:.0f}"


def _test_score(summary: dict[str, Any]) -> str:
    """The accuracy, or the loss if the task has no accuracy."""
    accuracy, loss = summary["test_accuracy"], summary["test_loss"]
    if accuracy is None and loss is not None:
        return f"test loss      {loss:.4f}"
    return f"test accuracy  {'–' if accuracy is None else f'{100 * accuracy:.2f} %'}"


def _instead(seconds: dict[str, float], measured: float) -> list[str]:
    if not seconds:
        return []
    names = ("none_waits", "fastest_alone", "fast_in_step", "all_in_step")
    ours, alone, fast, whole = (seconds[f"{name}_seconds"] for name in names)
    rows = [
        ("this run, measured, with exchanges", measured),
        ("all, as here, if none waits", ours),
        ("the fastest worker alone", alone),
        *[(f"the {seconds['fast_workers']:.0f} fastest in step", fast)] * (fast not in (alone, whole)),
        ("all in step, waiting for the slowest", whole),
    ]
    head = "  as many samples; below the first row, computed from the simulated step times, without exchanges:"
    return [head, *(f"    {who:<36}  {time:.0f} s" for who, time in rows)]


def _closing(summary: dict[str, Any], folder: RunFolder, pictures: dict[str, str]) -> str:
    pi = summary["pi_median"]
    seconds = summary["step_seconds"]
    simulated = f" (simulated step time {seconds.replace(',', ', ')} s)" if any(times(seconds)) else ""
    lines = [
        "",
        f"{summary['outcome']} after {summary['commits']} commits: {summary['start_seconds']:.0f} s to start, "
        f"{summary['seconds']:.0f} s of training{simulated}",
        f"  {_test_score(summary)}",
        f"  staleness      {_staleness(summary)}",
        f"  median π       {'–' if pi is None else f'{pi:.3f}, mean over the commits'}",
        *(f"  {line}" for line in table(summary["brought"]) if summary["brought"]),
        *_instead(summary["instead"], summary["seconds"]),
        *(f"  {name:<13}  {path}" for name, path in pictures.items()),
        *(f"  {name.partition('.')[0]:<13}  {where}" for name, where in sorted(folder.results.items(), reverse=True) if where),
    ]
    return "\n".join(lines)
