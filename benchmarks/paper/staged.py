"""A launcher like gem-train for other clusters: workers of unequal speed, or workers that leave and are replaced all the time.

`python -m benchmarks.paper.staged JSON`, with an experiment and its folders, prints where the run is as gem-train does, and
leaves the same folder.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.lifetime import interruptible
from gem_api.process.options import flags, settings_without_flags
from gem_client import Admin, GemError
from gem_worker.command import ignore_signals
from gem_worker.launcher.cluster import WORKER_NICENESS, Cluster, Member, Process, free_port, python
from gem_worker.launcher.monitor import RunMonitor
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks import load_task

from benchmarks.lib.load import split_evenly
from benchmarks.paper.experiments import Experiment

_NO_END = 1_000_000_000  # steps: the launcher ends the run, at a version
_LEASE_SECONDS = 5
_GROUPS = 5  # processes that the workers are spread over: what is replaced at a time


@dataclass(kw_only=True)
class Staged(Cluster):
    """A cluster that ends at a version, and regularly replaces a group of its workers.

    Args:
        admin: Asks the server for its version.
        end: The version at which all workers are told to leave.
        replace_every: Commits from one replacement to the next; 0: none.
        newcomer: Makes the n-th group that joins.
    """

    admin: Admin
    end: int
    replace_every: int = 0
    newcomer: Callable[[int], Member] | None = None
    replaced: int = 0
    ending: bool = False
    gone: list[Member] = field(default_factory=list)

    def supervise(self, healthy: bool, now: float) -> None:
        """As `Cluster` does, until the end is near. Raises ClusterError."""
        if self.ending:
            return
        super().supervise(healthy, now)
        try:
            version = self.admin.status().version
        except GemError:
            return  # not up yet
        if version >= self.end:
            self.ending = True
            for worker in self.workers:
                worker.signal(signal.SIGTERM)
        elif self.newcomer and self.replace_every and version >= (self.replaced + 1) * self.replace_every:
            self._replace(self.newcomer)

    def _replace(self, newcomer: Callable[[int], Member]) -> None:
        """Replaces the oldest group of workers. Every other time the group is killed instead of leaving."""
        oldest = self.workers.pop(0)
        oldest.signal(signal.SIGKILL if self.replaced % 2 else signal.SIGTERM)
        self.gone.append(oldest)
        self.replaced += 1
        self.workers.append(newcomer(self.replaced))
        self.workers[-1].start()

    @property
    def finished(self) -> bool:
        if self.ending:
            return not any(worker.running for worker in self.workers)
        return super().finished

    def stop(self) -> None:
        super().stop()
        for member in self.gone:
            member.wait(10)


@interruptible()
def main(experiment: dict[str, Any], data: str | None, runs: str) -> int:
    """Runs an experiment's cluster, and leaves a run folder in `runs`. Returns the exit status."""
    return _run(Experiment(**experiment), Path(data) if data else None, Path(runs))


def _run(experiment: Experiment, data: Path | None, runs: Path) -> int:
    settings = replace(experiment.hyperparameters(), steps=_NO_END, epochs=0, shards="replicate")
    options = {**vars(experiment), **vars(settings), "data": data, "evaluate_every": 2.0}
    options["step_seconds"] = f"{experiment.step_seconds:g}"  # gem-train's is a list of times
    folder = RunFolder.create(runs, "staged", options)
    address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    task = load_task(experiment.task, data)
    with Admin(address, timeout=5.0) as admin:
        cluster = _cluster(experiment, settings, data, folder, address, metrics, admin)
        click.echo(f"run {folder.path}: {experiment.workers} workers, rule {settings.rule}, task {experiment.task}")
        click.echo(f"server {address}, metrics http://{metrics}/metrics, logs in {folder.logs}")
        monitor = RunMonitor(address, cluster, folder, task, settings, options)
        try:
            cluster.start()
            return monitor.run()
        finally:
            ignore_signals()
            cluster.stop()
            monitor.close()


def _cluster(
    experiment: Experiment, settings: Hyperparameters, data: Path | None, folder: RunFolder, address: str, metrics: str,
    admin: Admin,
) -> Staged:  # fmt: skip
    workers, seconds, commits = experiment.workers, experiment.step_seconds, experiment.workers * experiment.commits_each
    server = python(
        "gem_server", f"--listen={address}", f"--metrics-listen={metrics}", f"--history={folder.commits}",
        f"--min-workers={workers}", *flags(settings),
    )  # fmt: skip
    servers = {"lane_listen": "127.0.0.1:0", "lease_seconds": _LEASE_SECONDS, **settings_without_flags(settings)}
    common = [f"--server={address}", f"--task={experiment.task}", *([f"--data={data}"] if data else [])]

    def member(name: str, count: int, step_seconds: float) -> Member:
        command = python("gem_worker", f"--name={name}", *common, *([f"--workers={count}"] if count > 1 else []))
        given = {"turns": "fixed", "step_seconds": step_seconds}
        return Process(name, folder.logs / f"{name}.log", command, given, WORKER_NICENESS)

    slow = [member("straggler", 1, seconds * experiment.slowdown)] if experiment.slowdown > 1 else []
    sizes = split_evenly(workers - len(slow), _GROUPS)
    members = [member(f"group-{number}", size, seconds) for number, size in enumerate(sizes)]
    return Staged(
        [Process("server", folder.logs / "server.log", server, servers)], [*members, *slow], click.echo, admin=admin,
        end=commits, replace_every=commits // (experiment.replacements + 1) if experiment.replacements else 0,
        newcomer=lambda number: member(f"newcomer-{number}", sizes[(number - 1) % len(sizes)], seconds),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
