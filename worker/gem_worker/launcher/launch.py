"""Runs a cluster to its end: the body of gem-train."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gem_api.process.lifetime import EXIT_INTERRUPTED
from gem_api.process.progress import say
from gem_api.ranges import all_bounds
from gem_client import InvalidRequest
from gem_ctl.local_runs import Announcement

from gem_worker.command import EXIT_FAILED, EXIT_WRONG_USE, ignore_signals, program
from gem_worker.device import devices
from gem_worker.launcher.cluster import Cluster, ClusterError, WrongSettings
from gem_worker.launcher.members import Host, Place, make_cluster, places
from gem_worker.launcher.monitor import RunMonitor
from gem_worker.launcher.options import hyperparameters_of, rule_of, with_defaults
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.launcher.tracebacks import users_frames
from gem_worker.tasks import Task, TaskError, has_optimizer, load_task


def launch(
    options: dict[str, Any],
    user_gave: set[str],
    host: Host,
    complain: Callable[[str], object],
    report: Callable[[dict[str, Any]], object] | None = None,
) -> tuple[int, RunFolder | None]:
    """Runs a cluster to its end.

    Args:
        options: The options of gem-train, from `run_options`.
        user_gave: The names of those that the user gave.
        host: Where the workers are to run.
        complain: Told why the run can't start or continue.
        report: Told each evaluation of the model, as `gem_worker.ray.train` says. What it raises stops the run.

    Returns:
        The exit status, and the run's folder; None if the run could not start.
    """
    torch.set_num_threads(1)
    try:
        devices(_own_device(options, host))  # or the line that says which ones there are
        with _task_errors():
            task = load_task(options["task"], options["data"] and Path(options["data"]))
        _require_large_enough(task, options["servers"])
        if has_optimizer(task) and not options["resume"]:
            options = _with_optimizer_of_task(options, user_gave)
        listening = places(host.connect(), options["servers"])
        folder = _folder(options)
    except (TaskError, ClusterError, InvalidRequest) as error:
        complain(str(error))
        return EXIT_WRONG_USE, None
    status = _run(folder, options, task, host, listening, complain, report)
    return status, folder if folder.path.exists() else None


def _require_large_enough(task: Task, servers: int) -> None:
    """Raises InvalidRequest if the task's model is too small for so many servers, TaskError if the task makes no model."""
    if servers > 1:
        with _task_errors():
            parameters = sum(each.numel() for each in task.model().parameters() if each.requires_grad)
        all_bounds(parameters, servers)


def _with_optimizer_of_task(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options of a new run whose task has an optimizer: workers make its steps, unless the user named another."""
    if "optimizer" in user_gave:
        return options
    return with_defaults({**options, "optimizer": "worker"}, user_gave)


def _own_device(options: dict[str, Any], host: Host) -> str:
    """The device on which this process evaluates the model: on the CPU if this machine need not have the workers' devices."""
    return "cpu" if host.remote else str(options["device"])


def _run(
    folder: RunFolder,
    options: dict[str, Any],
    task: Task,
    host: Host,
    listening: list[Place],
    complain: Callable[[str], object],
    report: Callable[[dict[str, Any]], object] | None,
) -> int:
    """Runs the cluster to its end, with a server at each place; returns the exit status."""
    resume = options["resume"] is not None
    hyperparameters = hyperparameters_of(options)
    leader = listening[0].address
    members = make_cluster(folder, options, hyperparameters, listening, host, resume)
    token = folder.admin_token.read_text().strip() if host.remote else None
    say(f"run {folder.path}: {_size(members, options, host)}, rule {rule_of(hyperparameters)}, task {options['task']}")
    _show_places(listening, folder)
    try:
        members.start(leader)  # while this process has one thread: workers may be copies of it
        with _task_errors():
            device = _own_device(options, host)
            monitor = RunMonitor(leader, members, folder, task, hyperparameters, options, device, token, report)
    except BaseException as error:
        members.stop()
        if isinstance(error, TaskError):
            return _refuse(folder, error, resume, complain)
        raise
    announcement = Announcement(folder.path, leader)
    try:
        status = _monitor(monitor, members, folder, resume, complain)
        if (misplaced := folder.misplaced) is not None:
            complain(misplaced)
        return status or EXIT_FAILED * bool(misplaced)
    finally:
        ignore_signals()
        members.stop()
        monitor.close()
        announcement.close()


def _show_places(listening: list[Place], folder: RunFolder) -> None:
    """Prints where the servers listen, the leader first."""
    leader, *others = listening
    say(f"live page http://{leader.metrics}/")
    say(f"server {leader.address}, metrics http://{leader.metrics}/metrics, logs in {folder.logs}")
    for index, place in enumerate(others, 1):
        say(f"server {place.address}, metrics http://{place.metrics}/metrics, range {index} of {len(listening)}")


def _monitor(monitor: RunMonitor, cluster: Cluster, folder: RunFolder, resume: bool, complain: Callable[[str], object]) -> int:
    """Monitors the cluster; if the run ends early, stops the cluster and saves what there is."""
    try:
        return _scored(monitor.run(), monitor, complain)
    except KeyboardInterrupt:
        ignore_signals()
        if (status := monitor.end_trained()) is not None:
            return _scored(status, monitor, complain)
        say(f"\nstopping: workers leave, {_servers_write(len(cluster.servers))} ...")
        cluster.stop()
        monitor.end_early("stopped")
        say(f"stopped. {_how_to_resume(folder)}")
        return EXIT_INTERRUPTED
    except WrongSettings as error:
        cluster.stop()
        return _refuse(folder, error, resume, complain)
    except ClusterError as error:
        ignore_signals()
        complain(str(error))
        cluster.stop()
        monitor.end_early("failed")
        if cluster.committed or resume:
            say(_how_to_resume(folder))
        return EXIT_FAILED
    except BaseException:  # of `report`; Ray Tune stops a trial by SystemExit
        cluster.stop()
        monitor.end_early("stopped")
        raise


def _scored(status: int, monitor: RunMonitor, complain: Callable[[str], object]) -> int:
    """The exit status of a run that was trained to its end, of which the last evaluation may have failed."""
    if (why := monitor.failed_evaluation) is None:
        return status
    complain(why)
    return status or EXIT_FAILED


def _how_to_resume(folder: RunFolder) -> str:
    return f"Resume with:  {program()} --resume {shlex.quote(str(folder.path))}"


@contextmanager
def _task_errors() -> Iterator[None]:
    """Turns an exception of the task into a TaskError with the task's part of the traceback."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"the task failed before the run began:\n{users_frames(traceback.format_exc())}") from error


def _refuse(folder: RunFolder, error: Exception, resume: bool, complain: Callable[[str], object]) -> int:
    """Tells why the run can't start and discards the folder of a new run; returns the exit status."""
    complain(str(error))
    if not resume:
        folder.discard()
    return EXIT_WRONG_USE


def _folder(options: dict[str, Any]) -> RunFolder:
    """The folder of the run to resume, or a new one. Raises ClusterError."""
    try:
        if options["resume"]:
            resumed = RunFolder(options["resume"])
            resumed.logs.mkdir(exist_ok=True)
            return resumed
        if options.get("folder"):
            return RunFolder.begin(options["folder"], options, given=True)
        return RunFolder.create(options["runs"], f"{options['task']}-{options['rule']}-{options['workers']}", options)
    except OSError as error:
        raise ClusterError(f"can't create a folder in {options['resume'] or options['runs']}: {error}") from error


def _servers_write(servers: int) -> str:
    return "the server writes a checkpoint" if servers == 1 else f"the {servers} servers write checkpoints"


def _size(cluster: Cluster, options: dict[str, Any], host: Host) -> str:
    """The number of workers, where they run, and the number of servers if there are several, as text."""
    workers, processes, servers = options["workers"], len(cluster.workers), options["servers"]
    shared = f" in {processes} process{'es' if processes > 1 else ''}" if processes < workers else ""
    where = f" on {host}" if host.remote else _on_devices(options)
    return f"{workers} workers{shared}{where}" + (f", {servers} servers" if servers > 1 else "")


def _on_devices(options: dict[str, Any]) -> str:
    """The workers' devices as text; empty for this machine's CPU, the default."""
    names = list(dict.fromkeys(map(str, devices(options["device"], range(options["workers"])))))
    return f" on {', '.join(names)}" if names != ["cpu"] else ""
