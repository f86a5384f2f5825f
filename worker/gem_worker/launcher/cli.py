"""The command gem-train: runs a server and its workers, on this machine or on Ray, and reports the results."""

from __future__ import annotations

import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.hyperparameters import DECLARATIONS, FIXED, Hyperparameters, flag
from gem_api.process.extras import install, needs
from gem_api.process.lifetime import EXIT_INTERRUPTED, interruptible
from gem_api.process.options import (
    DERIVED_SHARD_SIZE,
    DURABILITIES,
    SETTINGS,
    Number,
    Whole,
    WithHeadings,
    expanded,
    hyperparameter_options,
    log_level_option,
    option,
    until_stopped_option,
    without_end,
)
from gem_api.process.settings_file import config_option, document, setting
from gem_api.process.stacks import print_stacks_on_signal
from gem_api.ranges import MAX_RANGES, all_bounds
from gem_client import InvalidRequest
from gem_ctl.local_runs import Announcement

with needs("gem-train", "demo"):
    print_stacks_on_signal()  # before the imports that take seconds: from here on the signal doesn't end the process
    import torch

from gem_worker.command import (
    EXIT_FAILED,
    EXIT_WRONG_USE,
    data_option,
    device_option,
    evaluate_every_setting,
    exchange_options,
    ignore_signals,
    pace_options,
    task_option,
)
from gem_worker.device import devices
from gem_worker.launcher.cluster import Cluster, ClusterError, WrongSettings, require_rule
from gem_worker.launcher.members import HANDED_OVER, Place, make_cluster, places
from gem_worker.launcher.monitor import RunMonitor
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.launcher.stored_options import RunToResume, stored_options
from gem_worker.launcher.tracebacks import users_part
from gem_worker.tasks import Task, TaskError, has_optimizer, load_task

_HYPERPARAMETERS = [field.name for field in fields(Hyperparameters)]
_EPOCHS = {"digits": 80}
# Options that may change when a run is resumed: those that neither the server nor the results depend on.
_MAY_CHANGE = {
    "workers", "evaluate_every", "lease_seconds", "durability", "shared_memory", "overlap", "gradient_dtype", "theta_dtype",
    "processes", "device", "on", "ray_address", "resources", "working_dir", "log_level", "server_settings",
    *(set(_HYPERPARAMETERS) - set(FIXED)),
}  # fmt: skip


# Only the server knows which of these go together.
_OF_THE_RULE = {"rule", "rule_options", "optimizer", "optimizer_options", "schedule"}


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@option("--workers", type=Whole(1, 1000), default=4, help="Number of workers.")
@option(
    "--processes",
    type=Whole(1, 1000),
    show_default="one for each worker",
    help="Number of processes for the workers. Fewer processes take less memory: 100 workers fit into 2.",
)
@option(
    "--servers",
    type=Whole(1, MAX_RANGES),
    default=1,
    help="Number of server processes, each of which holds a part of the model. Several need --durability log, their default.",
)
@option(
    "--on",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Where the workers run: as processes on this machine, or as actors in a Ray cluster. Servers always run here.",
)
@setting(
    "ray_address",
    default="auto",
    help="Ray cluster to use. HOST:PORT; auto: the one that this machine belongs to; local: a new one on this machine alone.",
)
@option(
    "--resources",
    default="CPU=1",
    metavar="NAME=AMOUNT,...",
    help="Ray's resources for each process of workers, such as CPU=1,GPU=0.5. With GPU, --device is auto unless given.",
)
@option(
    "--working-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder that Ray copies to each node, and in which the workers start: the one with your task's module.",
)
@pace_options
@task_option
@data_option
@device_option
@exchange_options
@hyperparameter_options(epochs=(None, "80 for digits, else 1; 0 with --steps"), shard_size=(None, DERIVED_SHARD_SIZE))
@until_stopped_option
@option(
    "--runs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    help="Folder in which the run's own folder is created.",
)
@option(
    "--resume",
    envvar=["GEM_RESUME_RUN", "GEM_RESUME"],
    type=RunToResume(exists=True, file_okay=False, path_type=Path),
    help="Resume the run in this folder with its stored options. Options given now replace those that may change.",
)
@evaluate_every_setting(2.0)
@setting(
    "lease_seconds",
    type=Number(1, 3600),
    default=15.0,
    help="Seconds without a message after which a worker loses its shards to the others.",
)
@option(
    "--durability",
    type=click.Choice(DURABILITIES),
    default="snapshot",
    show_default="snapshot; log with several --servers",
    help="What survives a crash of a server. memory: nothing; snapshot: everything up to the last checkpoint (one every 10 "
    "seconds); log: every acknowledged commit.",
)
@log_level_option
@config_option
@click.version_option(__version__)
@click.pass_context
@interruptible()
def main(context: click.Context, /, **_: Any) -> None:
    """Trains a task with an asynchronous cluster: a server on this machine, or several, and workers here or on Ray.

    Prints live progress and writes summary.json, report.html, report.png and model.safetensors to runs/<id>/. Processes that
    die are restarted. If all workers fail alike before their first commit, the run ends and shows the error. Ctrl-C stops the
    run, writes a checkpoint, summary.json, report.html and report.png, and prints how to resume.

    Your own task is a class with model(), training_data(), test_data(), loss(model, batch) and correct(model, batch). Its
    only argument is the --data folder. If it has a method optimizer(model), each worker makes the steps of that optimizer.
    docs/guides/own-task.md has an example.

    \b
    Examples:
      gem-train                                   digits, 4 workers, 20 seconds
      gem-train --task mnist --data DIR --shards replicate --steps 400
      gem-train --workers 100 --processes 2 ...   many workers in few processes
      gem-train --servers 2 ...                   half of the model on each
      gem-train --rule downpour --workers 30 ...  what happens without GEM
      gem-train --config run.toml                 settings from a file
      gem-train --on ray --workers 32             workers on Ray
      gem-train --task my_module:MyTask           your own model and data

    Exit status: 0 if the run is complete; 1 if it can't continue, because a process keeps dying, or if the task fails in an
    evaluation (the model is saved); 2 if it can't start (no folder is left behind); 3 if training diverged; 130 after Ctrl-C
    or SIGTERM, unless everything was trained by then.
    """
    sys.exit(launch(*run_options(context), lambda why: click.echo(f"gem-train: {why}", err=True))[0])


def run_options(context: click.Context) -> tuple[dict[str, Any], set[str]]:
    """The options for `launch`, and the names of those that the user gave."""
    options, user_gave = expanded(context)
    options["server_settings"] = {name: value for name, value in document(context).items() if name in HANDED_OVER}
    return options, user_gave | ({"server_settings"} if options["server_settings"] else set())


def launch(
    options: dict[str, Any], user_gave: set[str], complain: Callable[[str], object], runtime_env: dict[str, Any] | None = None
) -> tuple[int, RunFolder | None]:
    """Runs a cluster to its end.

    Args:
        options: The options of gem-train, from `run_options`.
        user_gave: The names of those that the user gave.
        complain: Told why the run can't start or continue.
        runtime_env: Ray's environment for the workers.

    Returns:
        The exit status, and the run's folder; None if the run could not start.
    """
    try:
        options = _effective(options, user_gave)
        if not options["resume"] and user_gave & _OF_THE_RULE:
            require_rule(_hyperparameters(options))
        devices(_own_device(options))  # or the line that says which ones there are
        with _task_errors():
            task = load_task(options["task"], options["data"] and Path(options["data"]))
        _require_large_enough(task, options["servers"])
        if has_optimizer(task) and not options["resume"]:
            options = _with_optimizer_of_task(options, user_gave)
        host = _host(options, runtime_env)
        folder = _folder(options)
    except (TaskError, ClusterError, InvalidRequest) as error:
        complain(str(error))
        return EXIT_WRONG_USE, None
    status = _run(folder, options, task, host, complain)
    return status, folder if folder.path.exists() else None


def _effective(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options that the run uses: those of the user, of the run to resume, and defaults. Raises ClusterError."""
    if options["until_stopped"]:
        options |= vars(without_end(_hyperparameters(options), user_gave))
        user_gave |= {"epochs", "steps"}
    options = _resumed(options, user_gave) if options["resume"] else _completed(options)
    if options["on"] == "local" and (only := user_gave & {"resources", "working_dir"}):
        raise ClusterError(f"--{min(only)} needs --on ray".replace("_", "-"))
    options = _with_durability(options, user_gave)
    if options["resume"]:
        return options
    if options["on"] == "ray" and _wants_gpu(options["resources"]) and "device" not in user_gave:
        options["device"] = "auto"
    return options | vars(_hyperparameters(options).with_defaults(user_gave))


def _with_durability(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options with --durability log if there are several servers. Raises ClusterError if the user wants another one."""
    if options["servers"] == 1 or options["durability"] == "log":
        return options
    if "durability" in user_gave:
        raise ClusterError(
            f"--servers {options['servers']} needs --durability log, not {options['durability']}: with it, a server that dies "
            "comes back without losing a commit, and none is older than the others"
        )
    return {**options, "durability": "log"}


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
    options = {**options, "optimizer": "worker"}
    return options | vars(_hyperparameters(options).with_defaults(user_gave))


def _host(options: dict[str, Any], runtime_env: dict[str, Any] | None) -> str:
    """The address of this machine for the workers, after a connection to their Ray cluster. Raises ClusterError."""
    if options["on"] == "local":
        return "127.0.0.1"
    try:
        from gem_worker.launcher import on_ray
    except ModuleNotFoundError as missing:
        raise ClusterError(f"--on ray needs {missing.name}, which is not installed: {install('ray')}") from None
    if options["working_dir"]:
        runtime_env = {"working_dir": options["working_dir"], **(runtime_env or {})}
    runs = [Path(folder) for folder in (options["runs"], options["resume"]) if folder]
    runtime_env = on_ray.without_runs(runtime_env, runs)
    return on_ray.connect(options["ray_address"], on_ray.parsed(options["resources"]), runtime_env)


def _wants_gpu(resources: str) -> bool:
    return any(pair.partition("=")[0].strip() == "GPU" for pair in resources.split(","))


def _own_device(options: dict[str, Any]) -> str:
    """Where this process evaluates the model. On Ray on the CPU: this machine need not have the workers' devices."""
    return "cpu" if options["on"] == "ray" else str(options["device"])


def _run(folder: RunFolder, options: dict[str, Any], task: Task, host: str, complain: Callable[[str], object]) -> int:
    """Runs the cluster to its end; returns the exit status."""
    torch.set_num_threads(1)
    resume = options["resume"] is not None
    hyperparameters = _hyperparameters(options)
    listening = places(host, options["servers"])
    lead = listening[0].address
    members = make_cluster(folder, options, hyperparameters, listening, resume)
    token = folder.admin_token.read_text().strip() if options["on"] == "ray" else None
    click.echo(f"run {folder.path}: {_size(members, options)}, rule {hyperparameters.rule}, task {options['task']}")
    _show_places(listening, folder)
    try:
        with _task_errors():
            monitor = RunMonitor(lead, members, folder, task, hyperparameters, options, _own_device(options), token)
    except TaskError as error:
        return _refuse(folder, error, resume, complain)
    announcement = Announcement(folder.path, lead)
    try:
        return _monitor(monitor, members, folder, resume, complain)
    finally:
        ignore_signals()
        members.stop()
        monitor.close()
        announcement.close()


def _show_places(listening: list[Place], folder: RunFolder) -> None:
    """Prints where the servers listen, the lead first."""
    lead, *others = listening
    click.echo(f"live page http://{lead.metrics}/")
    click.echo(f"server {lead.address}, metrics http://{lead.metrics}/metrics, logs in {folder.logs}")
    for index, place in enumerate(others, 1):
        click.echo(f"server {place.address}, metrics http://{place.metrics}/metrics, range {index} of {len(listening)}")


def _monitor(monitor: RunMonitor, cluster: Cluster, folder: RunFolder, resume: bool, complain: Callable[[str], object]) -> int:
    """Starts the cluster and monitors it; if the run ends early, stops the cluster and saves what there is."""
    try:
        cluster.start()
        return _scored(monitor.run(), monitor, complain)
    except KeyboardInterrupt:
        ignore_signals()
        if (status := monitor.end_trained()) is not None:
            return _scored(status, monitor, complain)
        click.echo(f"\nstopping: workers leave, {_servers_write(len(cluster.servers))} ...")
        cluster.stop()
        monitor.end_early("stopped")
        click.echo(f"stopped. {_how_to_resume(folder)}")
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
            click.echo(_how_to_resume(folder))
        return EXIT_FAILED


def _scored(status: int, monitor: RunMonitor, complain: Callable[[str], object]) -> int:
    """The exit status of a run that was trained to its end, of which the last evaluation may have failed."""
    if (why := monitor.failed_evaluation) is None:
        return status
    complain(why)
    return status or EXIT_FAILED


def _how_to_resume(folder: RunFolder) -> str:
    return f"Resume with:  {_program()} --resume {shlex.quote(str(folder.path))}"


@contextmanager
def _task_errors() -> Iterator[None]:
    """Turns an exception of the task into a TaskError with the task's part of the traceback."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"the task failed before the run began:\n{users_part(traceback.format_exc())}") from error


def _refuse(folder: RunFolder, error: Exception, resume: bool, complain: Callable[[str], object]) -> int:
    """Tells why the run can't start and removes the folder of a new run; returns the exit status."""
    complain(str(error))
    if not resume:
        shutil.rmtree(folder.path, ignore_errors=True)
    return EXIT_WRONG_USE


def _program() -> str:
    """This command as the user typed it."""
    return sys.argv[0] if sys.argv[0].endswith("gem-train") else "gem-train"


def _hyperparameters(options: dict[str, Any]) -> Hyperparameters:
    given = Hyperparameters(**{name: options[name] for name in _HYPERPARAMETERS})
    return replace(given, shard_size=options["shard_size"] or given.default_shard_size)


def _completed(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the default number of epochs filled in. Raises ClusterError if the run would never end."""
    epochs = options["epochs"]
    if epochs is None:
        epochs = 0 if options["steps"] else _EPOCHS.get(options["task"], 1)
    return _with_an_end({**options, "epochs": epochs})


def _with_an_end(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options. Raises ClusterError if the run would never end without --until-stopped."""
    if not options["epochs"] and not options["steps"] and not options["until_stopped"]:
        raise ClusterError(
            "--epochs 0 without --steps would train forever: set one of them, or --until-stopped if that is what you want"
        )
    return options


def _resumed(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The stored options of the run to resume, with the user's changes. Raises ClusterError."""
    path = options["resume"]
    try:
        stored = stored_options(RunFolder(path).options)
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is not the folder of a run that can be resumed: {error}") from error
    changes = {name: options[name] for name in user_gave - {"resume", "runs", "until_stopped"}}
    ranges = _same_ranges(RunFolder(path), stored.get("servers", 1), changes)
    _require_changeable({name for name, value in changes.items() if name not in stored or str(value) != str(stored[name])})
    resumed = {**options, **stored, **changes, "servers": ranges, "resume": path}
    if {"epochs", "steps"} & changes.keys():
        return _with_an_end({**resumed, "until_stopped": options["until_stopped"]})
    return resumed


def _same_ranges(folder: RunFolder, stored: int, changes: dict[str, Any]) -> int:
    """The number of servers that a run to resume has: that of its checkpoints, else the stored one. Raises ClusterError if the
    user wants another one."""
    present = folder.count_ranges() or stored
    wanted = changes.pop("servers", present)
    if wanted != present:
        raise ClusterError(
            f"the run's checkpoints are for --servers {present}, not {wanted}: run `gem-ctl reshard {folder.checkpoints} "
            f"FOLDER --ranges {wanted}`, put FOLDER in the place of {folder.checkpoints}, and resume again"
        )
    return present


def _require_changeable(changed: set[str]) -> None:
    """Raises ClusterError, with the reason, if an option was changed that a resumed run can't change."""
    for names, why in (
        (changed & set(FIXED), "the server's state for each worker, and the shards leased so far, depend on them"),
        (changed - _MAY_CHANGE - set(FIXED), "its results must come from one task, one data set and one step time"),
    ):
        if names:
            flags_ = ", ".join(_written(name) for name in sorted(names))
            raise ClusterError(f"a resumed run can't change {flags_}: {why}; omit them, or start a new run")


def _written(name: str) -> str:
    """How a user writes an option or a setting."""
    if name in DECLARATIONS:
        return flag(name)
    has_option = all(param.opts for param in main.params if param.name == name)
    return f"--{name.replace('_', '-')}" if has_option else name


def _folder(options: dict[str, Any]) -> RunFolder:
    """The folder of the run to resume, or a new one. Raises ClusterError."""
    try:
        if options["resume"]:
            resumed = RunFolder(options["resume"])
            resumed.logs.mkdir(exist_ok=True)
            return resumed
        return RunFolder.create(options["runs"], f"{options['task']}-{options['rule']}-{options['workers']}", options)
    except OSError as error:
        raise ClusterError(f"can't create a folder in {options['resume'] or options['runs']}: {error}") from error


def _servers_write(servers: int) -> str:
    return "the server writes a checkpoint" if servers == 1 else f"the {servers} servers write checkpoints"


def _size(cluster: Cluster, options: dict[str, Any]) -> str:
    """The number of workers, where they run, and the number of servers if there are several, as text."""
    servers = f", {options['servers']} servers" if options["servers"] > 1 else ""
    return f"{options['workers']} workers{_in_processes(cluster, options['workers'])}{_on_devices(options)}{servers}"


def _in_processes(cluster: Cluster, workers: int) -> str:
    """The number of processes as text; empty if every worker has its own process."""
    count = len(cluster.workers)
    return f" in {count} process{'es' if count > 1 else ''}" if count < workers else ""


def _on_devices(options: dict[str, Any]) -> str:
    """The workers' devices, or their resources in Ray, as text; empty for this machine's CPU, the default."""
    if options.get("on") == "ray":
        return f" on Ray ({options['resources']} each)"
    names = list(dict.fromkeys(map(str, devices(options["device"], range(options["workers"])))))
    return f" on {', '.join(names)}" if names != ["cpu"] else ""


if __name__ == "__main__":
    main(prog_name="gem-train")
