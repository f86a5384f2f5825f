"""gem-ctl: asks a server how it is, and tells it what to do."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
from gem_api import __version__
from gem_api.hyperparameters import RULES, Hyperparameters
from gem_api.layout import MAX_PARAMETERS
from gem_api.process.addresses import DEFAULT_PORT
from gem_api.process.lifetime import interruptible
from gem_api.process.options import (
    DURABILITIES,
    SETTINGS,
    Number,
    ServerAddress,
    WithHeadings,
    credential_options,
    credentials,
    option,
)
from gem_api.process.printable import printable
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import GRADIENT_FORMATS, THETA_FORMATS
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from safetensors.numpy import save

from gem_client import Admin, GemError, Retry, connect
from gem_client.ctl import text
from gem_client.ctl.local_runs import find_runs
from gem_client.ctl.picture import SORTS
from gem_client.ctl.plan import PROXIES, Setup, plan
from gem_client.ctl.prometheus import Prometheus, PrometheusError
from gem_client.ctl.top import show
from gem_client.transport.security import Security

_PLUGINS = "gem_ctl.commands"


_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class Count(click.ParamType[int]):
    """A number of things, with an optional k, M, B or G, or T (powers of 1,000), in capitals or not."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", str(value).strip().upper())
        count = float(match[1]) * _POWERS[match[2]] if match else 0.0
        if not 1 <= count <= MAX_PARAMETERS:
            self.fail(f"{value!r} is not a number of parameters from 1 to 1T; write 156450, 124M or 1B", param, ctx)
        return int(count)


@dataclass(frozen=True)
class Target:
    """The server that a command is for.

    Attributes:
        given: Its address, if the user named it.
        runs: Where gem-train keeps its runs; looked through for a server that is not named.
        timeout: Seconds to wait for an answer.
        options: The options that say how to show who we are.
    """

    given: str | None
    runs: Path
    timeout: float
    options: dict[str, Any]

    @cached_property
    def server(self) -> str:
        """Its address. Raises click.UsageError if several local runs are going on."""
        if self.given is not None:
            return self.given
        found = find_runs(self.runs)
        if len(found) > 1:
            choices = "".join(f"\n  --server {address}   {folder}" for folder, address in found.items())
            raise click.UsageError(f"{len(found)} runs are going on in {self.runs}: choose one\n{choices}")
        for folder, address in found.items():
            click.echo(f"gem-ctl: {folder}, server {address}", err=True)
            return address
        return f"127.0.0.1:{DEFAULT_PORT}"

    def credentials(self) -> dict[str, Any]:
        """What `Admin` and `connect` are given. Read only by commands that ask the server; warns of a token in the clear."""
        given = credentials(self.options)
        if Security(**given).exposes_token(self.server):
            click.echo(f"gem-ctl: the token goes to {self.server} UNENCRYPTED: give --tls-ca", err=True)
        return given

    def admin(self) -> Admin:
        return Admin(self.server, self.timeout, **self.credentials())


class _TypedErrors(WithHeadings, click.Group):
    """Turns the SDK's errors into one line and exit status 1, and Ctrl-C into exit status 130. Takes in commands that other
    installed packages offer, such as those that need the server's code."""

    command_class = WithHeadings

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=_PLUGINS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        offered = entry_points(group=_PLUGINS, name=cmd_name) if command is None else ()
        return next((entry.load() for entry in offered), command)

    @interruptible()
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GemError as error:
            click.echo(f"gem-ctl: {printable(text.error(error))}", err=True)
            sys.exit(1)


@click.group(cls=_TypedErrors, context_settings=SETTINGS)
@option(
    "--server",
    envvar="GEM_SERVER",
    type=ServerAddress(),
    show_default="the server of the run of gem-train in --runs, else 127.0.0.1:50051",
    help="The server's address.",
)
@option(
    "--runs",
    envvar="GEM_RUNS",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    help="Folder with gem-train's runs. Without --server the run that is going on there is asked.",
)
@option("--timeout", envvar="GEM_TIMEOUT", type=Number(0.1), default=10.0, help="Seconds to wait for an answer.")
@credential_options
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context, /, server: str | None, runs: Path, timeout: float, **options: Any) -> None:
    """Looks after a GEM server.

    \b
    Examples:
      gem-ctl status
      gem-ctl --server host:50051 status --json | jq .version
      gem-ctl top
      gem-ctl pull model.safetensors
      gem-ctl report run.html

    Exit status of every command: 0 if it is done; 1 if it failed: the server is out of reach, refuses or is finishing, a file
    can't be written, a log is damaged, or Ctrl-C (top ends with 0 then); 2 for wrong use.
    """
    logging.getLogger("gem_client").addHandler(logging.NullHandler())  # one line of error, not one for each try
    context.obj = Target(server, runs, timeout, options)


@main.command(short_help="Shows the run at a glance.")
@option(
    "--json", "as_json", envvar="GEM_STATUS_JSON", is_flag=True, help="For scripts: one JSON object, all fields always there."
)
@click.pass_obj
def status(target: Target, as_json: bool) -> None:
    """Shows the run at a glance: version, workers, staleness, π, shards, memory."""
    with target.admin() as admin:
        answer = admin.status()
    click.echo(json.dumps(as_dict(answer), indent=2, allow_nan=False) if as_json else as_text(answer))


@main.command(short_help="Shows the run live, until Ctrl-C.")
@option("--every", envvar="GEM_TOP_EVERY", type=Number(0.01), default=1.0, help="Seconds from one picture to the next.")
@option(
    "--count", envvar="GEM_TOP_COUNT", type=click.IntRange(min=0), default=0, help="End after this many pictures; 0: never."
)
@option(
    "--sort",
    envvar="GEM_TOP_SORT",
    type=click.Choice(SORTS),
    default="name",
    help="Sort workers by this: names upwards, figures downwards.",
)
@click.pass_obj
def top(target: Target, every: float, count: int, sort: str) -> None:
    """Shows the run live, until Ctrl-C: progress, rates, loss, staleness, π, every worker; "!" marks what is off.

    Without a terminal it prints plain text, one picture after another.
    """
    show(target.admin(), target.server, every, count, sort)


@main.command("plan", short_help="Predicts memory, network and speed before a run is started.")
@option("--parameters", type=Count(), required=True, help="Size of the model, for example 124M or 1B.")
@option("--workers", type=click.IntRange(1), default=10, help="How many workers.")
@option("--compute-seconds", type=Number(0), default=0.1, help="Forward and backward pass of one step.")
@option("--local-steps", type=click.IntRange(1, 10_000), default=1, help="Steps that a worker makes for each commit.")
@option("--rule", type=click.Choice(RULES), default="gem", help="The update rule.")
@option("--proxy", type=click.Choice(list(PROXIES)), default="momentum", help="What gem compares a commit with.")
@option("--durability", type=click.Choice(DURABILITIES), default="snapshot", help="What outlives the server.")
@option("--shared-memory", is_flag=True, help="The workers are on the server's machine.")
@option("--overlap", is_flag=True, help="The workers compute while a commit is under way.")
@option("--gradient-dtype", type=click.Choice(list(GRADIENT_FORMATS)), default="float32", help="Gradients on the network.")
@option("--theta-dtype", type=click.Choice(list(THETA_FORMATS)), default="float32", help="Parameters on the network.")
def plan_run(**options: Any) -> None:
    """Predicts what a run needs: the server's memory, the network, and how many workers one server keeps up with.

    Measured on two cores that server and workers share; a machine with more cores does better.
    """
    click.echo(text.plan(plan(Setup(**options))))


@main.command(short_help="Writes the model to a safetensors file.")
@click.argument("out", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@click.pass_obj
def pull(target: Target, out: Path) -> None:
    """Writes the central variable to OUT, a safetensors file with the model's own tensor names, all float32.

    OUT may be - for standard output.
    """
    with connect(target.server, retry=Retry(give_up_after=target.timeout), **target.credentials()) as session:
        theta = session.pull()
        tensors = session.layout.split(theta)
        try:
            _write(out, save(tensors, metadata={"format": "pt", "gem_version": str(session.version)}))
        except OSError as error:
            raise click.ClickException(f"can't write {out}: {error}") from error
        what = f"version {session.version}, {len(tensors)} tensors, {theta.size} parameters"
        click.echo(f"wrote {out}: {what}", err=str(out) == "-")


@main.command(short_help="Writes one HTML page with plots and settings of a run.")
@click.argument("out", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), required=False)
@option(
    "--prometheus", envvar="GEM_PROMETHEUS", default="http://127.0.0.1:9090", help="The Prometheus that scrapes the server."
)
@option("--run", envvar="GEM_REPORT_RUN", help="The run's id, as status shows it; the newest one if not given.")
@option("--last", envvar="GEM_REPORT_LAST", type=Number(0.01), default=24.0, help="Hours to look back.")
def report(out: Path | None, prometheus: str, run: str | None, last: float) -> None:
    """Writes a report of a run to OUT: one HTML page with plots and settings, to keep and send around.

    OUT is gem-RUN.html if not given, - for standard output. Everything comes from Prometheus; the server need not be running
    any more.
    """
    try:
        from gem_client.ctl.report import find_run, page
    except ImportError as error:
        raise click.ClickException(
            f'reports are drawn with Matplotlib: pip install "gem-ps[report]", or use the workers\' image ({error})'
        ) from error
    try:
        source, now = Prometheus(prometheus), time.time()
        found = find_run(source, run, 3600 * last, now)
        path = out or Path(f"gem-{re.sub(r'[^A-Za-z0-9_.-]', '_', found.run_id)}.html")
        _write(path, page(source, found, now).encode())
    except PrometheusError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"can't write the report: {error}") from error
    click.echo(f"wrote {path}: run {found.run_id}, {text.duration(found.end - found.begin)}", err=str(path) == "-")


@main.command(short_help="Exit status 0 if the server serves, else 1.")
@click.pass_obj
def health(target: Target) -> None:
    """For health checks: exit status 0 if the server serves, 1 if it does not answer or is finishing."""
    with target.admin() as admin:
        if not admin.healthy():
            raise click.ClickException("the server is finishing")
    click.echo("serving")


@main.command(short_help="Has the server write a checkpoint now.")
@click.pass_obj
def checkpoint(target: Target) -> None:
    """Has the server write a checkpoint now, and waits for it."""
    with target.admin() as admin:
        answer = admin.checkpoint()
    click.echo(f"checkpoint of version {answer.version} in {printable(answer.path)} (on the server)")


@main.command(short_help="Ends the server gracefully: nothing that was sent is lost.")
@click.pass_obj
def drain(target: Target) -> None:
    """Ends the server gracefully: queued commits are applied and answered, the process exits.

    A server that has a --checkpoint-dir writes a checkpoint before it exits.

    Workers wait for a server to come back; start it with --resume.
    """
    with target.admin() as admin:
        queued = admin.drain()
    click.echo(f"the server is finishing; {queued} commits were queued")


@main.group(short_help="Lists the workers that are kept out of the run, or lets one in.")
def quarantine() -> None:
    """Workers that are kept out of the run because their gradients were refused too often in a row."""


@quarantine.command("list")
@click.pass_obj
def list_quarantine(target: Target) -> None:
    """Shows who is in quarantine, and why."""
    with target.admin() as admin:
        held = admin.quarantine()
    for worker in held:
        name, why = printable(worker.name), printable(worker.why)
        click.echo(f"{name}: {worker.refusals} refused in a row, the last for {why}")
    if not held:
        click.echo("no worker is in quarantine", err=True)


@quarantine.command("lift")
@click.argument("worker")
@click.pass_obj
def lift_quarantine(target: Target, worker: str) -> None:
    """Lets WORKER register again."""
    with target.admin() as admin:
        admin.lift_quarantine(worker)
    click.echo(f"{printable(worker)} may register again")


def _write(out: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all; - is standard output. Raises OSError."""
    if str(out) == "-":
        sys.stdout.buffer.write(content)
        return
    if out.exists() and not out.is_file():  # a pipe or a device is written to, never replaced
        out.write_bytes(content)
        return
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(out)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON values, names as in the .proto file: every field is there, None where it is not set."""
    return {field.name: _json_value(message, field) for field in message.DESCRIPTOR.fields}


def _json_value(message: Message, field: FieldDescriptor) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    values = list(value) if field.is_repeated else [value]
    if field.message_type is not None:
        values = [as_dict(entry) for entry in values]
    elif field.enum_type is not None:
        values = [field.enum_type.values_by_number[entry].name for entry in values]
    return values if field.is_repeated else values[0]


def as_text(answer: pb.GetStatusResponse) -> str:
    """The status for people."""
    settings, shards = answer.hyperparameters, answer.shards
    lines = [
        f"run         {answer.run_id}, {text.state(answer)}, up {text.duration(answer.uptime_seconds)}",
        f"rule        {settings.rule}, learning rate {settings.learning_rate}, momentum {settings.momentum}, "
        f"batch {settings.batch_size}",
        *(f"{name:<11} {value}" for name, value in text.special(Hyperparameters.from_message(settings)).items()),
        f"version     {answer.version} ({text.counts(answer.commits)})",
        f"model       {answer.parameter_count} parameters, memory {text.memory(answer)}",
        f"staleness   {answer.staleness:.1f}",
        f"median π    {text.optional(answer, 'pi_median', '.3f')}",
        f"loss        {text.optional(answer, 'training_loss', '.4f')}",
        f"evaluation  {text.evaluation(answer)}",
        f"shards      {text.epoch(shards)}: {shards.pending} pending, {shards.leased} leased, {shards.completed} completed",
        f"checkpoint  {text.checkpoint(answer)}",
        f"queue       {answer.queue_length}",
        f"leases      {len(answer.workers)} live; ended: {text.counts(answer.leases_ended) or 'none'}",
    ]
    if answer.workers:
        lines += [
            "",
            f"{'worker':<32} {'commits':>8} {'staleness':>9} {'median π':>9} {'loss':>8} {'shards':>6} {'rejected':>8} "
            f"{'lease':>7}",
        ]
    for worker in answer.workers:
        lines.append(
            f"{worker.name:<32} {worker.commits:>8} {worker.staleness:>9} {text.optional(worker, 'pi_median', '.3f'):>9} "
            f"{text.optional(worker, 'loss', '.4f'):>8} {worker.shards:>6} {worker.rejected:>8} "
            f"{worker.lease_remaining_seconds:>5.0f} s"
        )
    return "\n".join(map(printable, lines))
