"""Training on a Ray cluster, from Python.

    import gem_worker.ray

    result = gem_worker.ray.train("my_task:Sine", workers=32, epochs=400, runtime_env={"working_dir": "."})
    print(result.summary["test_loss"], result.folder)

`train` does what `gem-train --on ray` does. `join` adds workers to a run that exists.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from gem_api.process.extras import install
from gem_api.process.lifetime import EXIT_INTERRUPTED, signals_interrupt
from gem_api.process.progress import say
from gem_api.process.settings_file import WithoutOption, as_text
from gem_client import Admin, GemError, Hyperparameters, InvalidRequest

from gem_worker.command import ignore_signals
from gem_worker.launcher.cli import main as gem_train
from gem_worker.launcher.cluster import Cluster, ClusterError, ends_together
from gem_worker.launcher.options import run_options
from gem_worker.process.cli import main as gem_worker

try:
    from gem_worker.launcher.launch import launch
    from gem_worker.launcher.ray_host import RayHost, connection
    from gem_worker.launcher.ray_placement import Placement
except ModuleNotFoundError as missing:
    why = f"gem_worker.ray needs {missing.name}, which is not installed: {install('ray')}"
    raise ModuleNotFoundError(why, name=missing.name) from None

__all__ = ["Result", "RunError", "join", "train"]

_POLL_SECONDS = 0.25


class RunError(Exception):
    """A run could not start, could not continue, or diverged; the message says why.

    Attributes:
        folder: The run's folder, if there is one. It has the logs.
    """

    def __init__(self, why: str, folder: Path | None = None) -> None:
        super().__init__(why)
        self.folder = folder


@dataclass(frozen=True)
class Result:
    """A complete run.

    Attributes:
        summary: What summary.json holds, among it "test_accuracy" (0 to 1, or None), "test_loss", "commits" and "seconds".
        folder: The run's folder, with summary.json, report.html and model.safetensors.
    """

    summary: dict[str, Any]
    folder: Path


def train(
    task: str | None = None,
    *,
    workers: int | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    spread: bool | None = None,
    address: str | None = None,
    runtime_env: dict[str, Any] | None = None,
    report: Callable[[dict[str, Any]], object] | None = None,
    **options: Any,
) -> Result:
    """Trains a task with workers on a Ray cluster, as `gem-train --on ray` does. The server is a process on this machine.

    Prints progress. Ctrl-C and SIGTERM stop the run: it can be resumed with `resume=folder`.

    Args:
        task: "digits" (if None), "mnist", or your own as "module:Class". This process imports it too, to evaluate the model.
        workers: Number of workers, each an actor; 4 if None.
        resources_per_worker: Ray's resources for each actor, by name; {"CPU": 1} if None.
        labels: What the labels of the workers' nodes must be, by name: a value, "!value", "in(a,b)" or "!in(a,b)".
        spread: Whether to use as many nodes as possible, instead of Ray's own order.
        address: Of the Ray cluster: "auto" (if None), "local" or "host:port". Not used if `ray.init` was called before.
        runtime_env: Ray's environment for the workers, such as {"working_dir": "."} with the task's module.
        report: Called in this thread after each evaluation, and at the end of a complete run, with "test_loss", "test_accuracy"
            (0 to 1; not if the task has none), "version", "epoch" (from 0), "folder" (the run's, a text) and "done" (whether
            the run is complete). An exception that it raises stops the run, which can be resumed, and comes out of this call.
        options: gem-train's other options and settings, such as epochs=400, rule="gem", data="/data", overlap=True.

    Raises:
        RunError: The run could not start, could not continue, or diverged.
        KeyboardInterrupt: The run was stopped. It can be resumed.
        TypeError: gem-train has no such option.
    """
    named = {
        "on": "ray", "task": task, "workers": workers, "ray_address": address, "resources": _pairs(resources_per_worker),
        "ray_labels": _pairs(labels), "ray_spread": spread,
    }  # fmt: skip
    context, _, _ = _context("gem-train", gem_train, named | options)
    errors: list[str] = []
    try:
        with connection(), signals_interrupt():
            run, user_gave = run_options(context)
            status, folder = launch(run, user_gave, RayHost.for_run(run, runtime_env), errors.append, report)
    except (ClusterError, InvalidRequest, click.UsageError) as error:
        raise RunError(str(error)) from None
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if status or folder is None:
        raise RunError(
            "\n".join(errors) or "training diverged: a gradient is no longer finite", folder.path if folder else None
        )
    return Result(json.loads(folder.summary.read_text()), folder.path)


def join(
    address: str,
    task: str = "digits",
    *,
    workers: int = 4,
    token: str | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    spread: bool = False,
    ray_address: str = "auto",
    runtime_env: dict[str, Any] | None = None,
    logs: Path | None = None,
    **options: Any,
) -> None:
    """Adds workers on a Ray cluster to a run that exists; returns when the run is over.

    If this process is interrupted, its workers leave the run, which goes on without them.

    Args:
        address: Of the run's server, "host:port".
        task: The run's task.
        workers: Number of workers to add, each an actor.
        token: The server's access token for workers. For a run of `train` or `gem-train --on ray`, the content of the file
            worker-token in its folder.
        resources_per_worker: As for `train`.
        labels: As for `train`.
        spread: As for `train`.
        ray_address: Of the Ray cluster, as `address` for `train`.
        runtime_env: As for `train`.
        logs: Folder for the workers' logs; a new temporary folder if None.
        options: gem-worker's other options and settings, such as data="/data", tls_ca="ca.pem", overlap=True. Each node needs
            the files.

    Raises:
        RunError: The run can't be reached, the workers could not start or continue, or training diverged.
        TypeError: gem-worker has no such option.
    """
    if "token_file" in options:
        raise TypeError("join takes the token itself: token=Path(...).read_text().strip()")
    _, flags, settings = _context("gem-worker", gem_worker, {"server": address, "task": task, **options})
    tls = {name: options.get(name) for name in ("tls_ca", "tls_cert", "tls_key")}
    folder = logs or Path(tempfile.mkdtemp(prefix="gem-join-"))
    folder.mkdir(parents=True, exist_ok=True)
    group = f"joined-{secrets.token_hex(3)}"  # several joins to a run need different names
    names = [f"{group}-{number}" for number in range(workers)]
    try:
        placement = Placement.parsed(_pairs(resources_per_worker) or "CPU=1", _pairs(labels) or "", spread)
        host = RayHost(ray_address, placement, runtime_env)
        members = [host.member(name, folder / f"{name}.log", [*flags, f"--name={name}"], settings, token) for name in names]
        cluster = Cluster([], [*members], say)
        with Admin(address, timeout=5.0, token=token, **tls) as admin, connection(), signals_interrupt():
            cluster.ends_together = ends_together(Hyperparameters.from_message(admin.status().hyperparameters))
            host.connect()
            try:
                cluster.start()
                _tend(cluster, admin)
            finally:
                ignore_signals()
                cluster.stop()
    except (GemError, ClusterError) as error:
        raise RunError(str(error), folder) from None
    if cluster.diverged:
        raise RunError(f"training diverged: {', '.join(cluster.diverged)}", folder)


def _pairs(named: Mapping[str, float] | Mapping[str, str] | None) -> str | None:
    """As --resources takes them; None if there is none."""
    return ",".join(f"{name}={value}" for name, value in (named or {}).items()) or None


def _tend(cluster: Cluster, admin: Admin) -> None:
    """Restarts workers until all have ended. Raises ClusterError."""
    seen = version = 0
    while not cluster.finished:
        time.sleep(_POLL_SECONDS)
        done = cluster.done
        try:
            status = admin.status()
        except GemError:  # the server is restarting, or gone: the workers retry, then end
            if len(done) == len(cluster.workers):
                return
        else:
            version = status.version
            cluster.asked(status.state, done)
        cluster.supervise(healthy=0 < seen < version, now=time.monotonic())
        seen = version


def _context(program: str, command: click.Command, options: dict[str, Any]) -> tuple[click.Context, list[str], dict[str, Any]]:
    """The command's context with these options, its flags, and its settings without an option. Raises TypeError for an unknown
    option, RunError for a wrong value."""
    parameters = {str(parameter.name): parameter for parameter in command.params}
    flags: list[str] = []
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if name not in parameters:
            raise TypeError(f"{program} has no option {name!r}")
        if isinstance(parameters[name], WithoutOption):
            settings |= {} if value is None else {name: value}
        elif isinstance(value, bool):
            flags += (parameters[name].opts if value else parameters[name].secondary_opts)[:1]
        elif value is not None:
            flags.append(f"{parameters[name].opts[0]}={value}")
    try:
        context = command.make_context(program, list(flags))
        for name, value in settings.items():
            context.params[name] = parameters[name].process_value(context, as_text(value))
            context.set_parameter_source(name, ParameterSource.COMMANDLINE)  # an argument wins over the environment
        return context, flags, settings
    except click.ClickException as error:
        raise RunError(error.format_message()) from None
