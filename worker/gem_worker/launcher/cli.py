"""gem-train: a server and its workers on this machine, from the first commit to the report."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from gem_api import __version__
from gem_api.hyperparameters import FIXED, Hyperparameters, default_shard_size
from gem_api.process.extras import needs
from gem_api.process.lifetime import EXIT_INTERRUPTED, interruptible
from gem_api.process.options import (
    DERIVED_SHARD_SIZE,
    DURABILITIES,
    SETTINGS,
    Number,
    WithHeadings,
    flags,
    given,
    hyperparameter_options,
    option,
    until_stopped_option,
    without_end,
)
from gem_client.ctl.local_runs import Announcement

with needs("gem-train", "demo"):
    import torch

from gem_worker.command import (
    EXIT_WRONG_USE,
    data_option,
    exchange_flags,
    exchange_options,
    ignore_signals,
    step_seconds_option,
    task_option,
)
from gem_worker.launcher.cluster import WORKER_NICENESS, Cluster, ClusterError, Member, WrongSettings, free_port, python, spread
from gem_worker.launcher.monitor import Follower
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.launcher.tracebacks import users_part
from gem_worker.tasks import Task, TaskError, load_task

_SETTINGS = [field.name for field in fields(Hyperparameters)]
_EPOCHS = {"digits": 80}
_CHECKPOINT_SECONDS = 10
# In a resumed run; of its settings, what the server does not keep.
_MAY_CHANGE = {
    "workers", "evaluate_every", "lease_seconds", "durability", "shared_memory", "overlap", "gradient_dtype", "theta_dtype",
    "processes", *(set(_SETTINGS) - set(FIXED)),
}  # fmt: skip


_SWITCHES = ("1", "0", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n")


class _RunToResume(click.Path):
    """A run's folder. GEM_RESUME=true is meant for gem-server, which may share the environment: it names no folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        by_variable = ctx and param and param.name and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
        if by_variable and str(value).lower() in _SWITCHES:
            return None
        return super().convert(value, param, ctx)


@click.command(cls=WithHeadings, context_settings=SETTINGS)
@option("--workers", type=click.IntRange(1, 1000), default=4, help="Workers.")
@option(
    "--processes",
    type=click.IntRange(1, 1000),
    show_default="one for each worker",
    help="Processes that the workers are spread over. Few take less memory: 100 workers fit into 2.",
)
@step_seconds_option
@task_option
@data_option
@exchange_options
@hyperparameter_options(epochs=(None, "80 for digits, else 1; 0 with --steps"), shard_size=(None, DERIVED_SHARD_SIZE))
@until_stopped_option
@option(
    "--runs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    help="Where the folder of the run is made.",
)
@option(
    "--resume",
    envvar=["GEM_RESUME_RUN", "GEM_RESUME"],
    type=_RunToResume(exists=True, file_okay=False, path_type=Path),
    help="Go on with the run in this folder, with its own settings; those that you give change it, if they can be changed.",
)
@option("--evaluate-every", type=Number(0.1), default=2.0, help="Seconds between evaluations on held-out data, at least.")
@option(
    "--lease-seconds",
    type=Number(1, 3600),
    default=15.0,
    help="How long a worker may be silent before its shards go to others.",
)
@option(
    "--durability",
    type=click.Choice(DURABILITIES),
    default="snapshot",
    help="What a server that dies comes back with. memory: nothing; snapshot: all up to its last checkpoint, 10 seconds old; "
    "log: every commit that was answered.",
)
@click.version_option(__version__)
@click.pass_context
@interruptible()
def main(context: click.Context, /, **options: Any) -> None:
    """Trains a task with an asynchronous cluster on this machine: one server process, several workers.

    Shows live progress and leaves runs/<id>/ with summary.json, report.png and model.safetensors. Processes that die
    are started again; a bug that all workers hit before their first commit ends the run and is shown. Ctrl-C stops everything,
    leaves a checkpoint, summary.json and report.png, and says how to resume.

    Your own task is a class with model(), training_data(), test_data(), loss(model, batch) and correct(model, batch), made
    with the --data folder as its only argument; README.md shows one.

    \b
    Examples:
      gem-train                                   digits, 4 workers, one minute
      gem-train --task mnist --data DIR --shards replicate --steps 400
      gem-train --workers 100 --processes 2 ...   many workers in few processes
      gem-train --rule downpour --workers 30 ...  what happens without GEM
      gem-train --task my_module:MyTask           your own model and data

    Exit status: 0 if the run is complete; 1 if it can't go on, because a process dies again and again; 2 if it can't start as
    asked (no folder is left); 3 if training diverged; 130 after Ctrl-C or SIGTERM.
    """
    try:
        user_gave = given(context)
        if options["until_stopped"]:
            options |= vars(without_end(_settings(options), user_gave))
            user_gave |= {"epochs", "steps"}
        if options["resume"]:
            options = _resumed(options, user_gave)
        else:
            options = _completed(options)
            options |= vars(_settings(options).with_defaults(user_gave))
        with _users_code():
            task = load_task(options["task"], options["data"] and Path(options["data"]))
        folder = _folder(options)
    except (TaskError, ClusterError) as error:
        click.echo(f"gem-train: {error}", err=True)
        sys.exit(2)
    sys.exit(_run(folder, options, task, resume=options["resume"] is not None))


def _run(folder: RunFolder, options: dict[str, Any], task: Task, *, resume: bool) -> int:
    torch.set_num_threads(1)
    settings = _settings(options)
    address = f"127.0.0.1:{free_port()}"
    metrics = f"127.0.0.1:{free_port()}"
    cluster = _cluster(folder, options, settings, address, metrics, resume)
    size = f"{options['workers']} workers{_in_processes(cluster, options['workers'])}"
    click.echo(f"run {folder.path}: {size}, rule {settings.rule}, task {options['task']}")
    click.echo(f"server {address}, metrics http://{metrics}/metrics, logs in {folder.logs}")
    try:
        with _users_code():
            follower = Follower(address, cluster, folder, task, settings, options)
    except TaskError as error:
        return _refuse(folder, error, resume)
    announcement = Announcement(folder.path, address)
    try:
        cluster.start()
        return follower.follow()
    except KeyboardInterrupt:
        ignore_signals()
        click.echo("\nstopping: the workers leave, the server writes a checkpoint ...")
        cluster.stop()
        follower.end_early("stopped")
        click.echo(f"stopped. Go on with:  {_program()} --resume {shlex.quote(str(folder.path))}")
        return EXIT_INTERRUPTED
    except WrongSettings as error:
        cluster.stop()
        return _refuse(folder, error, resume)
    except ClusterError as error:
        ignore_signals()
        click.echo(f"gem-train: {error}", err=True)
        cluster.stop()
        follower.end_early("failed")
        return 1
    finally:
        ignore_signals()
        cluster.stop()
        follower.close()
        announcement.close()


@contextmanager
def _users_code() -> Iterator[None]:
    """Turns what the user's own code raises into a TaskError that shows their part of the traceback."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"the task failed before the run began:\n{users_part(traceback.format_exc())}") from error


def _refuse(folder: RunFolder, error: Exception, resume: bool) -> int:
    """Says why the run can't begin, and leaves no folder of one that has not; returns the exit status."""
    click.echo(f"gem-train: {error}", err=True)
    if not resume:
        shutil.rmtree(folder.path, ignore_errors=True)
    return EXIT_WRONG_USE


def _program() -> str:
    """This command as the user called it."""
    return sys.argv[0] if sys.argv[0].endswith("gem-train") else "gem-train"


def _settings(options: dict[str, Any]) -> Hyperparameters:
    shard_size = options["shard_size"] or default_shard_size(options["batch_size"])
    return Hyperparameters(**{name: options[name] for name in _SETTINGS} | {"shard_size": shard_size})


def _completed(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the epochs that were left open. Raises ClusterError."""
    epochs = options["epochs"]
    if epochs is None:
        epochs = 0 if options["steps"] else _EPOCHS.get(options["task"], 1)
    return _with_an_end({**options, "epochs": epochs})


def _with_an_end(options: dict[str, Any]) -> dict[str, Any]:
    """The options, unless the run would never end and the user did not ask for that: ClusterError then."""
    if not options["epochs"] and not options["steps"] and not options["until_stopped"]:
        raise ClusterError(
            "--epochs 0 without --steps would train for ever: give one of them, or --until-stopped if that is what you want"
        )
    return options


def _resumed(options: dict[str, Any], user_gave: set[str]) -> dict[str, Any]:
    """The options of the run to resume, with those that the user changes. Raises ClusterError."""
    path = options["resume"]
    try:
        kept = json.loads(RunFolder(path).options.read_text())
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path} is no folder of a run that can be resumed: {error}") from error
    changes = {name: options[name] for name in user_gave - {"resume", "runs", "until_stopped"}}
    _require_changeable({name for name, value in changes.items() if name not in kept or str(value) != str(kept[name])})
    resumed = {**options, **kept, **changes, "resume": path}
    if {"epochs", "steps"} & changes.keys():
        return _with_an_end({**resumed, "until_stopped": options["until_stopped"]})
    return resumed


def _require_changeable(changed: set[str]) -> None:
    """Raises ClusterError, with the reason, for options that a run keeps for good."""
    for names, why in (
        (changed & set(FIXED), "what the server holds for the workers, and the shards dealt so far, depend on them"),
        (changed - _MAY_CHANGE - set(FIXED), "its results are of the task, data and step time that it began with"),
    ):
        if names:
            flags_ = ", ".join("--" + name.replace("_", "-") for name in sorted(names))
            raise ClusterError(f"a resumed run can't change {flags_}: {why}; leave them out, or start a new run")


def _folder(options: dict[str, Any]) -> RunFolder:
    """The run's folder, a new one unless it is resumed. Raises ClusterError."""
    if options["resume"]:
        return RunFolder(options["resume"])
    try:
        return RunFolder.create(options["runs"], f"{options['task']}-{options['rule']}-{options['workers']}", options)
    except OSError as error:
        raise ClusterError(f"can't make a folder in {options['runs']}: {error}") from error


def _cluster(
    folder: RunFolder, options: dict[str, Any], settings: Hyperparameters, address: str, metrics: str, resume: bool
) -> Cluster:
    server = Member(
        "server",
        python(
            "gem_server",
            f"--listen={address}",
            f"--metrics-listen={metrics}",
            f"--history={folder.commits}",
            f"--checkpoint-dir={folder.checkpoints}",
            f"--checkpoint-interval={_CHECKPOINT_SECONDS}",
            f"--durability={options['durability']}",
            f"--lease-seconds={options['lease_seconds']}",
            *flags(settings),
            *(["--until-stopped"] if settings.endless else []),
        ),
        folder.logs / "server.log",
    )
    groups = spread(options["workers"], options["processes"] or options["workers"])
    common = _worker_flags(options, address)
    workers = [_worker(folder, group, common) for group in groups]
    return Cluster(server, workers, lambda line: click.echo(f"  {line}"), resume)


def _worker_flags(options: dict[str, Any], address: str) -> list[str]:
    """What all worker processes are told."""
    told = [f"--server={address}", f"--task={options['task']}", *exchange_flags(options)]
    if options["data"]:
        told.append(f"--data={options['data']}")
    if options["step_seconds"]:
        told.append(f"--step-seconds={options['step_seconds']}")
    return told


def _worker(folder: RunFolder, numbers: range, common: list[str]) -> Member:
    """A process with the workers of these numbers; worker-7 is called so whichever process it is in, this time or the next."""
    if len(numbers) == 1:
        name, names = f"worker-{numbers[0]}", [f"--name=worker-{numbers[0]}"]
    else:
        name = f"workers-{numbers[0]}-{numbers[-1]}"
        names = ["--name=worker", f"--workers={len(numbers)}", f"--first-worker={numbers[0]}"]
    return Member(name, python("gem_worker", *names, *common), folder.logs / f"{name}.log", WORKER_NICENESS)


def _in_processes(cluster: Cluster, workers: int) -> str:
    """Where there are fewer processes than workers."""
    count = len(cluster.workers)
    return f" in {count} process{'es' if count > 1 else ''}" if count < workers else ""


if __name__ == "__main__":
    main(prog_name="gem-train")
