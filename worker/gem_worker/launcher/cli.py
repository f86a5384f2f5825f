"""The command gem-train: runs a server and its workers, on this machine or on Ray, and reports the results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.errors import InvalidRequest
from gem_api.process.extras import install, needs
from gem_api.process.lifetime import interruptible
from gem_api.process.logs import print_error
from gem_api.process.options import (
    DERIVED_SHARD_SIZE,
    DURABILITIES,
    SETTINGS,
    Number,
    Whole,
    WithHeadings,
    hyperparameter_options,
    log_level_option,
    until_stopped_option,
)
from gem_api.process.progress import end_output
from gem_api.process.settings_file import config_option, setting
from gem_api.ranges import MAX_RANGES

from gem_worker.command import (
    EXIT_WRONG_USE,
    data_option,
    device_option,
    evaluate_every_setting,
    exchange_options,
    pace_options,
    task_option,
)
from gem_worker.launcher.cluster import ClusterError
from gem_worker.launcher.members import Host, ThisMachine
from gem_worker.launcher.options import RunToResume, run_options
from gem_worker.tasks import TaskError, require_name


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@click.option("--workers", type=Whole(1, 1000), default=4, help="Number of workers.")
@click.option(
    "--processes",
    type=Whole(1, 1000),
    show_default="one for each worker",
    help="Number of processes for the workers. Fewer processes take less memory: 100 workers fit into 2.",
)
@click.option(
    "--servers",
    type=Whole(1, MAX_RANGES),
    default=1,
    help="Number of server processes, each of which holds a part of the model. Several need --durability log, their default.",
)
@click.option(
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
@click.option(
    "--resources",
    default="CPU=1",
    metavar="NAME=AMOUNT,...",
    help="Ray's resources for each process of workers, such as CPU=1,GPU=0.5. With GPU, --device is auto unless given.",
)
@setting(
    "ray_labels",
    default="",
    show_default="any node",
    help="Labels that a node of the Ray cluster must have to run workers. NAME=VALUE,...; a value may also be !VALUE, in(A,B) "
    "or !in(A,B).",
)
@setting("ray_spread", type=bool, default=False, help="Run the workers on as many nodes of the Ray cluster as possible.")
@click.option(
    "--working-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder that Ray copies to each node, and in which the workers start: the one with your task's module.",
)
@pace_options
@task_option
@data_option
@device_option
@exchange_options
@hyperparameter_options(epochs=(None, "40 for digits, else 1; 0 with --steps"), shard_size=(None, DERIVED_SHARD_SIZE))
@until_stopped_option
@click.option(
    "--runs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    help="Folder in which the run's own folder is created.",
)
@click.option(
    "--resume",
    envvar=["GEM_RESUME_RUN", "GEM_RESUME"],
    type=RunToResume(exists=True, file_okay=False, path_type=Path),
    help="Resume the run in this folder with its stored options. Options given now replace those that may change. In an "
    "empty folder a new run begins, so that the same command starts a run and goes on with it.",
)
@evaluate_every_setting(2.0)
@setting(
    "lease_seconds",
    type=Number(1, 3600),
    default=15.0,
    help="Seconds without a message after which a worker loses its shards to the others.",
)
@click.option(
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

    Prints live progress and writes summary.json, report.html and model.safetensors to runs/<id>/. Processes that
    die are restarted. If all workers fail alike before their first commit, the run ends and shows the error. Ctrl-C stops the
    run, writes a checkpoint, summary.json and report.html, and prints how to resume.

    Your own task is a class with model(), training_data(), test_data(), loss(model, batch) and correct(model, batch). Its
    only argument is the --data folder. If it has a method optimizer(model), each worker makes the steps of that optimizer.
    docs/guides/your-data.md has an example.

    \b
    Examples:
      gem-train --optimizer adamw                 digits, 4 workers, a minute
      gem-train --task mnist --data DIR --shards replicate --steps 400
      gem-train --workers 100 --processes 2 ...   many workers in few processes
      gem-train --servers 2 ...                   half of the model on each
      gem-train --rule downpour --workers 30 ...  what happens without GEM
      gem-train --config run.toml                 settings from a file
      gem-train --on ray --workers 32             workers on Ray
      gem-train --task my_module:MyTask           your own model and data

    Exit status: 0 if the run is complete; 1 if it can't continue, because a process keeps dying, or if the task fails in an
    evaluation (the model is saved), or if the run's folder has no room for the results (a line says where they are); 2 if it
    can't start (no folder is left behind); 3 if training diverged; 130 after Ctrl-C or SIGTERM, unless everything was trained
    by then.
    """
    try:
        if context.params["task"] is not None:
            require_name(context.params["task"])
        options, user_gave = run_options(context)
        with needs("gem-train", "demo"):
            from gem_worker.launcher.launch import launch
        host = _host(options)
    except (ClusterError, InvalidRequest, TaskError) as error:
        _complain(str(error))
        sys.exit(EXIT_WRONG_USE)
    outcome = launch(options, user_gave, host, _complain)
    end_output()
    sys.exit(outcome[0])


def _complain(why: str) -> None:
    print_error(f"gem-train: {why}")


def _host(options: dict[str, Any]) -> Host:
    """Where the workers are to run. Raises ClusterError."""
    if options["on"] == "local":
        return ThisMachine()
    try:
        from gem_worker.ray.host import RayHost
    except ModuleNotFoundError as missing:
        raise ClusterError(f"--on ray needs {missing.name}, which is not installed: {install('ray')}") from None
    return RayHost.for_run(options)


if __name__ == "__main__":
    main(prog_name="gem-train")
