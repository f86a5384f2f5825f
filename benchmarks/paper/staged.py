"""A launcher like gem-train for other clusters: workers of unequal speed, or workers that leave and are replaced all the time.

`python -m benchmarks.paper.staged` prints where the run is as gem-train does, and leaves the same folder.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.lifetime import interruptible
from gem_api.process.options import SETTINGS, expanded, flags, hyperparameter_options, setting_options, settings_without_flags
from gem_api.process.settings import settings_of
from gem_client import Admin, GemError
from gem_worker.command import ignore_signals
from gem_worker.launcher.cluster import WORKER_NICENESS, Cluster, Member, Process, free_port, python
from gem_worker.launcher.monitor import RunMonitor
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks import load_task

from benchmarks.lib.processes import split_evenly

_NO_END = 1_000_000_000  # steps: the launcher ends the run, at a version
_LEASE_SECONDS = 5


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

    def tend(self, healthy: bool, now: float) -> None:
        """As `Cluster` does, until the end is near. Raises ClusterError."""
        if self.ending:
            return
        super().tend(healthy, now)
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


@click.command(context_settings=SETTINGS)
@click.option("--workers", type=click.IntRange(2), required=True)
@click.option("--commits", type=click.IntRange(1), required=True, help="The run ends at this version.")
@click.option("--processes", type=click.IntRange(1), default=2, help="Worker processes; a straggler has one more.")
@click.option("--step-seconds", type=float, default=0.0, help="Simulated compute time of a gradient.")
@click.option("--slowdown", type=click.FloatRange(1), default=1.0, help="Factor by which one worker is slower.")
@click.option("--replacements", type=click.IntRange(0), default=0, help="Number of times that a group of workers is replaced.")
@click.option("--runs", type=click.Path(path_type=Path), required=True)
@setting_options(row for row in settings_of("train").values() if row.key in ("task", "data"))
@hyperparameter_options
@click.pass_context
@interruptible()
def main(context: click.Context, /, **_: Any) -> None:
    """Runs the cluster, and leaves a run folder in RUNS."""
    options = expanded(context)[0]
    options["steps"], options["epochs"] = _NO_END, 0
    settings = Hyperparameters(**{each.name: options[each.name] for each in fields(Hyperparameters)})
    folder = RunFolder.create(options["runs"], "staged", options)
    address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    task = load_task(options["task"], options["data"])
    with Admin(address, timeout=5.0) as admin:
        cluster = _cluster(options, settings, folder, address, metrics, admin)
        click.echo(f"run {folder.path}: {options['workers']} workers, rule {settings.rule}, task {options['task']}")
        click.echo(f"server {address}, metrics http://{metrics}/metrics, logs in {folder.logs}")
        monitor = RunMonitor(address, cluster, folder, task, settings, {**options, "evaluate_every": 2.0})
        try:
            cluster.start()
            status = monitor.run()
        finally:
            ignore_signals()
            cluster.stop()
            monitor.close()
    sys.exit(status)


def _cluster(
    options: dict[str, Any], settings: Hyperparameters, folder: RunFolder, address: str, metrics: str, admin: Admin
) -> Staged:
    workers, groups, seconds = options["workers"], options["processes"], options["step_seconds"]
    server = python(
        "gem_server", f"--listen={address}", f"--metrics-listen={metrics}", f"--history={folder.commits}",
        f"--min-workers={workers}", *flags(settings),
    )  # fmt: skip
    servers = {"lane_listen": "127.0.0.1:0", "lease_seconds": _LEASE_SECONDS, **settings_without_flags(settings)}
    common = [f"--server={address}", f"--task={options['task']}"]
    if options["data"]:
        common.append(f"--data={options['data']}")

    def member(name: str, count: int, step_seconds: float) -> Member:
        more = [f"--workers={count}"] if count > 1 else []
        command = python("gem_worker", f"--name={name}", *common, *more)
        return Process(
            name, folder.logs / f"{name}.log", command, {"turns": "fixed", "step_seconds": step_seconds}, WORKER_NICENESS
        )

    slow = [member("straggler", 1, seconds * options["slowdown"])] if options["slowdown"] > 1 else []
    sizes = split_evenly(workers - len(slow), groups)
    members = [member(f"group-{number}", size, seconds) for number, size in enumerate(sizes)]
    every = options["commits"] // (options["replacements"] + 1) if options["replacements"] else 0
    serving = Process("server", folder.logs / "server.log", server, servers)
    return Staged(
        [serving], [*members, *slow], click.echo, admin=admin,
        end=options["commits"], replace_every=every,
        newcomer=lambda number: member(f"newcomer-{number}", sizes[(number - 1) % len(sizes)], seconds),
    )  # fmt: skip


if __name__ == "__main__":
    main()
