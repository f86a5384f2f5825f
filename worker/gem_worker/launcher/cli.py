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
from gem_api.process.options import SETTINGS, WithHeadings, command_options, option
from gem_api.process.progress import end_output, say

from gem_worker.command import EXIT_WRONG_USE, program
from gem_worker.launcher.cluster import ClusterError
from gem_worker.launcher.members import Host, ThisMachine
from gem_worker.launcher.new_task import write_task
from gem_worker.launcher.options import run_options
from gem_worker.tasks import TaskError, require_name


def _write_new(context: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Writes a task, says how to run it, and exits, as the callback of --new."""
    if path is None or context.resilient_parsing:
        return
    try:
        task = write_task(path)
    except TaskError as error:
        _complain(str(error))
        context.exit(EXIT_WRONG_USE)
    say(f"{path}: a task that learns a sine. Put your own data, model and loss in place of its own. It runs as it is:")
    say(f"{program()} --task {task} --epochs 100")
    context.exit()


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@command_options("train")
@option(
    "--new",
    type=click.Path(path_type=Path),
    heading="Most used",
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_write_new,
    help="Write a task to this new file, such as my_task.py, for you to change; print the command that trains it; exit.",
)
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
    --new my_task.py writes one to begin with.

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
    """The machines for the workers. Raises ClusterError."""
    if options["on"] == "local":
        return ThisMachine()
    try:
        from gem_worker.launcher.ray_host import RayHost
    except ModuleNotFoundError as missing:
        raise ClusterError(f"--on ray needs {missing.name}, which is not installed: {install('ray')}") from None
    return RayHost.for_run(options)


if __name__ == "__main__":
    main(prog_name="gem-train")
